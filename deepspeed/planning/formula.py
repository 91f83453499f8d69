"""Model states of a model of which only the size is known: the paper's formula, in the formats of the configuration.

    bytes per parameter    weights          gradients        masters, state
    mixed-precision Adam   2                2                4 + 8
    fp32 with Adam         4                4                8
    bf16 with Lion         2                2                4 + 4
    divided by ranks       stage 3          stage 2, 3       stage 1, 2, 3

Source: ZeRO (arXiv:1910.02054), section 3.1. Called by `comparison`.
"""

from __future__ import annotations

import torch
from torch import nn

from deepspeed.config import DeepSpeedConfig
from deepspeed.planning.states import ModelStates, Optimizers
from deepspeed.planning.terms import Term
from deepspeed.planning.tiers import Places
from deepspeed.precision.policy import DtypePolicy
from deepspeed.sharding import estimate
from deepspeed.zero.flat import Kind

__all__ = ["states_by_formula"]


def states_by_formula(numel: int, config: DeepSpeedConfig, ranks: int, *, device_type: str = "cuda") -> ModelStates:
    """What each of `ranks` ranks holds of `numel` parameters.

    Args:
        numel: parameters.
        config: formats, optimizer, stage and offload.
        ranks: that hold the same weights.
        device_type: of the engine.
    """
    param = nn.Parameter(torch.empty(1, 1))
    policy, places = DtypePolicy.from_config(config, "cpu"), Places.of(config, device_type)
    held = nn.ParameterList([param])
    kind = Kind(0, policy.param_for(param), policy.master_for(param))
    gradient, travels = policy.grad_accumulation_for(kind.param_dtype), policy.communication_for(kind.param_dtype)
    state_nbytes = sum(Optimizers(held).state_nbytes(config, kind, policy.state))
    is_apart = kind.master_dtype != kind.param_dtype or "device" not in (places.state, places.weight)
    master_nbytes = kind.master_dtype.itemsize if is_apart else 0
    states = estimate.model_states(
        numel,
        config.zero_optimization.stage,
        ranks,
        parameter_nbytes=kind.param_dtype.itemsize,
        gradient_nbytes=gradient.itemsize,
        optimizer_nbytes=master_nbytes + state_nbytes,
    )
    is_sharded = config.zero_optimization.stage >= 2
    terms = (
        Term("weights", int(states.parameter_nbytes), places.weight),
        Term("gradients", int(states.gradient_nbytes), places.gradient if is_sharded else "device"),
        Term("masters and optimizer state", int(states.optimizer_nbytes), places.state),
    )
    return ModelStates(terms, numel * kind.param_dtype.itemsize, numel * travels.itemsize, stays_gathered=False)
