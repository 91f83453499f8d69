"""A checkpoint holds one model: what each stage of a pipeline alone knows comes together in a save and in a load.

    save    later stages: names of frozen parameters, buffers, ... --> rank 0 puts them into the state of the whole model
    load    every stage: its names, what does not fit              --> all stages: all names, one verdict

Does not live here: tensors, which each stage writes and reads under global names (`saving`, `loading`, which call this).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import JsonValue

from deepspeed.checkpoint import EngineState, encode_client_state
from deepspeed.checkpoint.agreement import ranks_of, together
from deepspeed.errors import CheckpointError
from deepspeed.topology.mesh import AxisGroup

__all__ = ["ModelNames", "add_facts", "agreed", "facts_of_stage", "names_of_model"]

Found = TypeVar("Found")

_LISTS = ("frozen_parameters", "buffers")
_DICTS = ("shared_parameters", "extra_state")


def facts_of_stage(state: EngineState) -> JsonValue:
    """What the whole model's state is to hold of this stage.

    Raises:
        CheckpointError: extra state (`get_extra_state`) of a layer behind the first stage holds tensors.
    """
    optimizer = state["optimizer"]
    extra, tensors = encode_client_state(dict(state["extra_state"]), "extra state of a pipeline stage")
    if tensors:
        raise CheckpointError(
            f"get_extra_state() of {', '.join(map(repr, state['extra_state']))} gives tensors, which are kept for layers of "
            "a pipeline's first stage alone. Make them buffers, or give plain values."
        )
    return {
        "frozen_parameters": cast("JsonValue", state["frozen_parameters"]),
        "buffers": cast("JsonValue", state["buffers"]),
        "shared_parameters": cast("JsonValue", dict(state["shared_parameters"])),
        "extra_state": extra,
        "members": None if optimizer is None else cast("JsonValue", optimizer["members"]),
    }


def add_facts(state: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Put what a stage said into the encoded state of the whole model."""
    for key in _LISTS:
        state[key] += [name for name in facts[key] if name not in state[key]]
    for key in _DICTS:
        state[key] = {**facts[key], **state[key]}
    if facts["members"] is not None:
        for group, more in zip(state["optimizer"]["members"], facts["members"], strict=True):
            group += [name for name in more if name not in group]


class ModelNames(NamedTuple):
    """What a checkpoint must have for a model."""

    tensors: frozenset[str]
    """Parameters and buffers."""

    members: tuple[tuple[str, ...], ...]
    """Names of the trained parameters of each optimizer group."""


def names_of_model(tensors: Iterable[str], members: Sequence[Sequence[str]], pipe: AxisGroup) -> ModelNames:
    """Those of all stages, from those of this one. Collective over the pipeline."""
    if pipe.size == 1:
        return ModelNames(frozenset(tensors), tuple(map(tuple, members)))
    own = cast("JsonValue", [sorted(tensors), [list(group) for group in members]])

    def lead(stages: list[Any]) -> JsonValue:
        of_groups = zip(*(groups for _, groups in stages), strict=True)
        return [
            sorted({name for names, _ in stages for name in names}),
            [list(dict.fromkeys(name for part in group for name in part)) for group in of_groups],
        ]

    names, groups = cast("list[list[Any]]", together(ranks_of(pipe.rank, pipe.size, pipe.group), lambda: own, lead))
    return ModelNames(frozenset(names), tuple(map(tuple, groups)))


def agreed(check: Callable[[], Found], pipe: AxisGroup) -> Found:
    """What `check` gives; where it raises on one stage, all raise. Collective over the pipeline."""
    if pipe.size == 1:
        return check()
    found: list[Found] = []
    together(ranks_of(pipe.rank, pipe.size, pipe.group), lambda: found.append(check()))
    return found[0]
