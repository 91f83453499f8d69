"""Two states without their tensors: counters, schedule, hyperparameters, loss scale, place in the data, the client's state.

Lives here: walking two nestings side by side, and which keys say how a checkpoint was written instead of what was trained.
Does not live here: parameters and moments (`comparing`). Called by `diff`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from deepspeed.checkpoint.source import CheckpointSource

__all__ = ["StateDifference", "compare_states", "compare_values"]

_HOW_IT_WAS_WRITTEN = ("zero_stage", "dp_world_size", "mesh", "ds_config")
_MODEL_AXES = ("pipe", "sequence", "tensor")
_COMPARED_ELSEWHERE = ("scalars", "members")
_ABSENT = object()


class StateDifference(NamedTuple):
    """One place in the state where A and B do not agree."""

    path: str
    a: Any
    b: Any
    counts: bool
    """False: it says how the checkpoint was written, or one of two different layouts does not store it."""


def compare_states(a: CheckpointSource, b: CheckpointSource, *, same_layout: bool) -> list[StateDifference]:
    """Compare what the engines and the user stored, and the states of the ranks that both have."""
    found = []
    state_a, state_b = _training(a.state), _training(b.state)
    for path, one, other in compare_values(state_a, state_b, "state"):
        is_stored_once = one is None or other is None
        key = path.split(".")[1].split("[")[0] if "." in path else ""
        counts = key not in _HOW_IT_WAS_WRITTEN and (same_layout or not is_stored_once)
        found.append(StateDifference(path, one, other, counts))
    client = compare_values(a.client_state(), b.client_state(), "client_state")
    found += [StateDifference(path, one, other, same_layout or None not in (one, other)) for path, one, other in client]
    return found + _rank_states(a, b, same_layout=same_layout)


def compare_values(a: Any, b: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Walk two nestings; give path and both values wherever they differ, None for what a side lacks."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(key for key in b if key not in a)]:
            yield from compare_values(a.get(key, _ABSENT), b.get(key, _ABSENT), f"{path}.{key}")
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        for number in range(max(len(a), len(b))):
            one = a[number] if number < len(a) else _ABSENT
            other = b[number] if number < len(b) else _ABSENT
            yield from compare_values(one, other, f"{path}[{number}]")
    elif not _is_equal(a, b):
        yield path, None if a is _ABSENT else a, None if b is _ABSENT else b


def _training(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state without what is compared per parameter; empty and absent are the same."""
    kept = {key: None if value == {} else value for key, value in state.items()}
    optimizer = state.get("optimizer")
    if optimizer is not None:
        kept["optimizer"] = {key: value for key, value in optimizer.items() if key not in _COMPARED_ELSEWHERE}
    return kept


def _rank_states(a: CheckpointSource, b: CheckpointSource, *, same_layout: bool) -> list[StateDifference]:
    """Random generators and the like, for the ranks that both checkpoints have."""
    ranks, sizes = a.state["dp_world_size"], _model_sizes(a)
    if ranks != b.state["dp_world_size"] or sizes != _model_sizes(b):
        return []
    found = []
    for rank in range(ranks * math.prod(sizes)):
        one, other = a.rank_state(rank), b.rank_state(rank)
        for key in [*one, *(key for key in other if key not in one)]:
            value_a, value_b = one.get(key, _ABSENT), other.get(key, _ABSENT)
            if any(compare_values(value_a, value_b, key)):  # one line for a generator, not one for each of its words
                told_a = None if value_a is _ABSENT else "..."
                told_b = None if value_b is _ABSENT else "another value"
                counts = same_layout or None not in (told_a, told_b)
                found.append(StateDifference(f"rank_state[{rank}].{key}", told_a, told_b, counts))
    return found


def _model_sizes(source: CheckpointSource) -> list[int]:
    """Ranks along the axes whose ranks share one model or one sequence."""
    return [source.state.get("mesh", {}).get(axis, 1) for axis in _MODEL_AXES]


def _is_equal(a: Any, b: Any) -> bool:
    if a is b or {id(a), id(b)} == {id(None), id(_ABSENT)}:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return bool(a == b)
