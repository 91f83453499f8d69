"""Which tensors of a parameter's size an optimizer keeps, before it has made a step: for memory and space that is planned.

    optimizer --- a copy of it, with one small parameter ---> one step ---> the state that it made

The optimizer itself is left as it is. Called by `engine.tiers`. Not here: their values.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.ops.optimizer import GroupOptimizer

__all__ = ["state_tensors"]

_NUMEL = 3  # not 1: a tensor of one element may be a counter


def state_tensors(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, *, state_dtype: torch.dtype | None = None
) -> dict[str, torch.dtype]:
    """State key -> dtype, of the tensors that `optimizer` keeps for an element-wise stepped parameter.

    Args:
        optimizer: a torch optimizer; hooks registered on it do not run.
        group: the one of its `param_groups` that the parameter is in.
        dtype: of the parameter.
        state_dtype: what an optimizer of this package is told to keep the state of 16-bit parameters in; None: its choice.
    """
    param = nn.Parameter(torch.zeros(_NUMEL, dtype=dtype))
    param.grad = torch.zeros_like(param)
    trial = object.__new__(type(optimizer))
    trial.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    trial.__dict__.update({key: OrderedDict() for key in vars(optimizer) if key.endswith("_hooks")})
    trial.state = defaultdict(dict)
    if isinstance(trial, GroupOptimizer):
        trial.state_dtype = state_dtype
    trial.param_groups = [{**group, "params": [param]}]
    of_given: dict[str, Any] = next((optimizer.state[p] for p in group["params"] if optimizer.state.get(p)), {})
    trial.state[param] = {key: _small(value) for key, value in of_given.items()}
    type(optimizer).step(trial)
    state = trial.state[param]
    return {
        key: value.dtype
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == param.shape and key != "step"
    }


def _small(value: Any) -> Any:
    """State that is there already (torch's Adagrad makes it at once), for a parameter of three elements."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        return value.detach().cpu().clone()
    return torch.zeros(_NUMEL, dtype=value.dtype)
