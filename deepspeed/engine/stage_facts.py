"""A checkpoint holds one model: what ranks with other layers or other experts know comes together in a save and in a load.

    save    later stages, ranks with other experts: names of frozen parameters, buffers, ...
                                                  --> rank 0 puts them into the state of the whole model
    load    every such rank: its names, what does not fit
                                                  --> all of them: all names, one verdict

Does not live here: tensors, which each rank writes and reads under global names (`saving`, `loading`, which call this).
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


def facts_of_stage(state: EngineState, is_wanted: Callable[[str], bool]) -> JsonValue:
    """What the whole model's state is to hold of this rank's; of names for which `is_wanted` is true.

    Raises:
        CheckpointError: extra state (`get_extra_state`) of a module that rank 0 does not have holds tensors.
    """
    optimizer = state["optimizer"]
    of_modules = {name: value for name, value in state["extra_state"].items() if is_wanted(name)}
    extra, tensors = encode_client_state(of_modules, "extra state of a part of the model")
    if tensors:
        raise CheckpointError(
            f"get_extra_state() of {', '.join(map(repr, of_modules))} gives tensors, which are kept for modules of rank 0 "
            "alone: not for later stages of a pipeline, nor for experts on other ranks. Make them buffers, or give plain "
            "values."
        )
    members = None if optimizer is None else [[name for name in g if is_wanted(name)] for g in optimizer["members"]]
    return {
        "frozen_parameters": [name for name in state["frozen_parameters"] if is_wanted(name)],
        "buffers": [name for name in state["buffers"] if is_wanted(name)],
        "shared_parameters": {name: owner for name, owner in state["shared_parameters"].items() if is_wanted(name)},
        "extra_state": extra,
        "members": cast("JsonValue", members),
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


def names_of_model(tensors: Iterable[str], members: Sequence[Sequence[str]], holders: AxisGroup) -> ModelNames:
    """Those of all stages and experts, from those of this rank. Collective over `holders`, which together hold one model."""
    if holders.size == 1:
        return ModelNames(frozenset(tensors), tuple(map(tuple, members)))
    own = cast("JsonValue", [sorted(tensors), [list(group) for group in members]])

    def lead(stages: list[Any]) -> JsonValue:
        of_groups = zip(*(groups for _, groups in stages), strict=True)
        return [
            sorted({name for names, _ in stages for name in names}),
            [list(dict.fromkeys(name for part in group for name in part)) for group in of_groups],
        ]

    names, groups = cast("list[list[Any]]", together(ranks_of(holders.rank, holders.size, holders.group), lambda: own, lead))
    return ModelNames(frozenset(names), tuple(map(tuple, groups)))


def agreed(check: Callable[[], Found], holders: AxisGroup) -> Found:
    """What `check` gives; where it raises on one rank, all raise. Collective over `holders`."""
    if holders.size == 1:
        return check()
    found: list[Found] = []
    together(ranks_of(holders.rank, holders.size, holders.group), lambda: found.append(check()))
    return found[0]
