"""Model states of a model of which only the size is known: the paper's formula, in the formats of the configuration. Pure.

    bytes per parameter    weights          gradients        masters, state
    mixed-precision Adam   2                2                4 + 8
    fp32 with Adam         4                4                8
    bf16 with Lion         2                2                4 + 4
    divided by ranks       stage 3          stage 2, 3       stage 1, 2, 3

What an optimizer keeps, its name tells (`optim.kept`). One of which it does not is made, which takes torch (`kept_state`).

Source: ZeRO (arXiv:1910.02054), section 3.1. Called by `planned`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from deepspeed.config import DeepSpeedConfig
from deepspeed.optim.kept import kept_tensors
from deepspeed.planning.places import Places
from deepspeed.planning.ranks import Ranks
from deepspeed.planning.terms import ModelStates, Moved, RankPlan, Term
from deepspeed.planning.traffic import sent_by
from deepspeed.precision.formats import NBYTES, Formats
from deepspeed.sharding import estimate

__all__ = ["OfSize", "states_by_formula"]

_ADAMW = "AdamW"


@dataclass(frozen=True)
class OfSize:
    """Plans for one rank of a model of which only the size is known.

    Attributes:
        numel: parameters of a rank that holds all of its layers' parts.
        ranks: how they are laid out.
        device_type: of the devices.
    """

    numel: int
    ranks: Ranks
    device_type: str

    def plan(self, label: str, config: DeepSpeedConfig) -> RankPlan:
        """One setting's."""
        states = states_by_formula(self.numel, config, self.ranks.zero, device_type=self.device_type)
        return RankPlan(label, states.terms, sent_by(states, config))


def states_by_formula(numel: int, config: DeepSpeedConfig, ranks: int, *, device_type: str = "cuda") -> ModelStates:
    """What each of `ranks` ranks holds of `numel` parameters.

    Args:
        numel: parameters.
        config: formats, optimizer, stage and offload.
        ranks: that hold the same weights.
        device_type: of the engine.
    """
    formats, places = Formats.of(config), Places.of(config, device_type)
    param = formats.param or "fp32"
    master, gradient = formats.master or param, formats.grad_accumulation or param
    travels = formats.communication or "fp32"
    is_apart = master != param or "device" not in (places.state, places.weight)
    master_nbytes = NBYTES[master] if is_apart else 0
    states = estimate.model_states(
        numel,
        config.zero_optimization.stage,
        ranks,
        parameter_nbytes=NBYTES[param],
        gradient_nbytes=NBYTES[gradient],
        optimizer_nbytes=master_nbytes + _state_nbytes(config, formats),
    )
    is_sharded = config.zero_optimization.stage >= 2
    terms = (
        Term("weights", int(states.parameter_nbytes), places.weight),
        Term("gradients", int(states.gradient_nbytes), places.gradient if is_sharded else "device"),
        Term("masters and optimizer state", int(states.optimizer_nbytes), places.state),
    )
    return ModelStates(terms, (Moved(numel * NBYTES[param], numel * NBYTES[travels], ranks),), stays_gathered=False)


def _state_nbytes(config: DeepSpeedConfig, formats: Formats) -> int:
    """Bytes of optimizer state per parameter."""
    block = config.optimizer
    kept = kept_tensors(_ADAMW, {}) if block is None else kept_tensors(block.type, block.params)
    is_stepped_wide = "fp32" in (formats.param or "fp32", formats.master, formats.state)
    if kept is None or not is_stepped_wide:
        asked: int = importlib.import_module("deepspeed.planning.kept_state").kept_nbytes(config)
        return asked
    return kept * NBYTES["fp32"]
