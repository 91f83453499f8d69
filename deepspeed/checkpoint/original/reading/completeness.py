"""What the rest of a checkpoint shows to be missing: files that no count of ranks covers, and entries of the optimizer.

    num_experts of the model states      --> expert files          layer_0_expert_1_* is lacking
    ep_size_<n>, the group of experts    --> optimizers of experts expp_rank_1_* is lacking
    param_shapes of every mp_rank        --> weights, layer files  layer 02, which holds '2.a.weight', is lacking
    entries of a pipeline's optimizers   --> layer files           one more layer was trained
    other parameters of the same group   --> state of each         'fc1.weight' has no exp_avg

Pure: tables in, `CheckpointDamagedError` out. Does not live here: counts of ranks (`model_ranks`), elements (`slices`).
Called by `model_ranks`, `rank_slices`, `stages` and `universal`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.original.files import ExpertFile
from deepspeed.checkpoint.original.reading.experts import is_expert
from deepspeed.checkpoint.original.reading.pipeline import Shape
from deepspeed.common.wording import some
from deepspeed.errors import CheckpointDamagedError

__all__ = [
    "CURE",
    "check_experts",
    "check_layer_slices",
    "check_optimizer_state",
    "check_same_names",
    "check_trained_layers",
    "check_trained_names",
    "check_weights",
    "expert_ranks_of",
]

CURE = "Bring the files together from every node that saved some, or copy the checkpoint again."

_EXPERT_GROUP = re.compile(r"ep_size_(\d+)")
_ADAM = {"betas", "eps"}
_FIRST_MOMENT, _SECOND_MOMENT, _STEP = "exp_avg", "exp_avg_sq", "step"
_SHOWN = 5


def check_experts(files: Sequence[ExpertFile], model: Mapping[str, Any]) -> None:
    """Compare the expert files of a checkpoint with the experts of each layer that the model states count.

    Args:
        files: those of all model-parallel ranks: without slices of experts each rank stores some.
        model: model states; without `num_experts` the highest number in a layer counts.
    """
    stated = model.get("num_experts")
    counts = [int(count) for count in stated] if isinstance(stated, list | tuple) else []
    found: dict[int, set[int]] = {} if model.get("ds_autoep_layers") else {layer: set() for layer in range(len(counts))}
    for file in files:
        found.setdefault(file.layer or 0, set()).add(file.expert)
    lacking = [
        f"layer_{layer}_expert_{expert}_*_model_states.pt"
        for layer, experts in sorted(found.items())
        for expert in range(max([*counts[layer : layer + 1], *(number + 1 for number in experts)], default=0))
        if expert not in experts
    ]
    if lacking:
        raise CheckpointDamagedError(
            f"{some(lacking, _SHOWN)} lost: the model has more experts than there are files. {CURE}"
        )


def expert_ranks_of(optimizer: Any) -> int:
    """How many expert-parallel ranks stored an optimizer beside this one, by its groups of experts; 0: it has no experts."""
    groups = optimizer.get("param_groups") or () if isinstance(optimizer, Mapping) else ()
    names = [str(group.get("name")) for group in groups if group.get("moe")]
    sizes = [int(found[1]) for name in names if (found := _EXPERT_GROUP.fullmatch(name))]
    return max(sizes, default=min(1, len(names)))


def check_weights(model: Mapping[str, Any], shapes_found: Mapping[str, Shape], *, is_sharded: bool) -> None:
    """Compare the weights of one model-parallel rank with the names that its model states list.

    Experts lie in files of their own (`check_experts`), the weights of a pipeline in those of its layers; at ZeRO stage 3
    trained weights lie in the optimizer's shards, whose elements are counted.
    """
    module = model.get("module")
    if module is None:
        return
    shapes = {} if is_sharded else {n: tuple(s) for group in model.get("param_shapes") or () for n, s in group.items()}
    lacking = [n for n, shape in shapes.items() if not is_expert(n) and shapes_found.get(n) != shape]
    lacking += [name for name in model.get("buffer_names") or () if name not in module]
    frozen, fragments = model.get("frozen_param_shapes") or {}, model.get("frozen_param_fragments") or {}
    lost = [name for name in frozen if name not in fragments and name not in module]
    lacking += lost if len(lost) < len(frozen) else []
    if lacking:
        raise CheckpointDamagedError(f"the model states list {_quoted(lacking)} and do not hold it whole. {CURE}")


def check_same_names(what: str, names_of_ranks: Sequence[Collection[str]]) -> None:
    """Every tensor-parallel rank holds a slice of the same tensors."""
    every = dict.fromkeys(name for names in names_of_ranks for name in names)
    for rank, names in enumerate(names_of_ranks):
        if lacking := [name for name in every if name not in names]:
            raise CheckpointDamagedError(
                f"tensor-parallel rank {rank} of {len(names_of_ranks)} has no {what} of {_quoted(lacking)}, which others "
                f"have. {CURE}"
            )


# -- layers of a pipeline -------------------------------------------------------------------------------------------------


def check_layer_slices(layers: Mapping[int, Sequence[Any]], degree: int) -> None:
    """Every layer has one file of each of `degree` tensor-parallel ranks."""
    cut = [f"layer {layer:02d} has {len(states)} of {degree}" for layer, states in layers.items() if len(states) != degree]
    if cut:
        raise CheckpointDamagedError(f"files of tensor-parallel slices lack: {some(cut, _SHOWN)}. {CURE}")


def check_trained_names(trained: Iterable[str], weights: Collection[str]) -> None:
    """Compare the names in the `param_shapes` of all stages of a pipeline with those that its layer files hold."""
    lacking = [name for name in trained if name not in weights and not is_expert(name)]
    if lacking:
        numbers = {name.partition(".")[0] for name in lacking}
        files = [f"layer_{int(number):02d}-*model_states.pt" for number in sorted(numbers) if number.isdecimal()]
        raise CheckpointDamagedError(
            f"no layer file holds {_quoted(lacking)}, which the stages trained: lost is "
            f"{some(files, _SHOWN, 'a layer_*-model_states.pt')}. {CURE}"
        )


def check_trained_layers(layers: Mapping[int, Sequence[Shape]], stages: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Compare the layer files of a pipeline without ZeRO with its optimizers: every entry needs a parameter of its shape.

    Stages that share a tied layer each have an entry for it, whose state is equal; it needs one parameter.

    Args:
        layers: layer number -> shapes of its parameters.
        stages: for each stage the state of its optimizer's entries, in order.
    """
    present = [tuple(shapes) for shapes in layers.values()]
    there = Counter(shape for shapes in present for shape in shapes)
    seen: list[Mapping[str, Any]] = []
    needed: Counter[Shape] = Counter()
    for entries in stages:
        own = entries[_leading_tied(entries, seen, present) :]
        needed.update(shape for entry in own if (shape := _shape_of(entry)) is not None and not _is_in(entry, seen))
        seen += entries
    if lacking := needed - there:
        shapes = ", ".join(f"{count} of shape {shape}" for shape, count in lacking.items())
        raise CheckpointDamagedError(
            f"the optimizers of the stages have more parameters ({shapes}) than the layers {', '.join(map(str, layers))}, "
            f"which are there: a layer_*-model_states.pt is lost. {CURE}"
        )


def _leading_tied(
    entries: Sequence[Mapping[str, Any]], seen: Sequence[Mapping[str, Any]], layers: Collection[Sequence[Shape]]
) -> int:
    """Entries at a stage's beginning that make up tied layers of earlier stages: at least one entry of each is equal."""
    at = 0
    while found := next((n for n in map(len, layers) if n and _is_tied(entries[at : at + n], n, seen, layers)), 0):
        at += found
    return at


def _is_tied(
    entries: Sequence[Mapping[str, Any]], count: int, seen: Sequence[Mapping[str, Any]], layers: Collection[Sequence[Shape]]
) -> bool:
    is_layer = len(entries) == count and tuple(map(_shape_of, entries)) in layers
    return is_layer and any(_is_in(entry, seen) for entry in entries)


def _is_in(entry: Mapping[str, Any], seen: Iterable[Mapping[str, Any]]) -> bool:
    tensors = _tensors(entry)
    return any(
        _tensors(other).keys() == tensors.keys() and all(torch.equal(v, other[k]) for k, v in tensors.items())
        for other in seen
        if _shape_of(other) == _shape_of(entry)
    )


def _tensors(entry: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in entry.items() if isinstance(value, Tensor) and value.dim() > 0}


def _shape_of(entry: Mapping[str, Any]) -> Shape | None:
    return next((tuple(value.shape) for value in _tensors(entry).values()), None)


# -- state of the optimizer -----------------------------------------------------------------------------------------------


def check_optimizer_state(
    groups: Sequence[Mapping[str, Any]],
    members: Sequence[Sequence[str]],
    keys: Mapping[str, Set[str]],
    *,
    dims: Mapping[str, int],
    may_lack_all: bool,
    steps: int,
) -> None:
    """Compare the state of each parameter with that of the others in its group.

    Args:
        groups: hyperparameters.
        members: names of each group's parameters; empty where they are not known: groups alike are taken as one then.
        keys: parameter -> keys of its state.
        dims: parameter -> dimensions. Optimizers other than Adam's kind may keep different state by it.
        may_lack_all: a parameter that never had a gradient may have no state.
        steps: steps that changed the weights.
    """
    is_one = not members and len({frozenset(group) for group in groups}) == 1
    known = [(groups[0], list(keys))] if is_one else zip(groups, members, strict=False)
    lacking: list[str] = []
    for group, names in known:
        is_adam = group.keys() >= _ADAM and not group.get("use_muon")
        kinds: dict[int, list[str]] = {}
        for name in names:
            if name in keys and (keys[name] or not may_lack_all):
                kinds.setdefault(0 if is_adam else dims.get(name, 0), []).append(name)
        for of_kind in kinds.values():
            needed = {key for name in of_kind for key in keys[name]}
            needed |= _needed_by_adam(needed) if is_adam and steps else set()
            needed -= {_STEP} if _STEP in group else set()
            lacking += [f"{key} of {name!r}" for name in of_kind for key in sorted(needed - keys[name])]
    if lacking:
        raise CheckpointDamagedError(
            f"the optimizer's state lacks {some(lacking, _SHOWN)}, which the rest of it shows to belong there. {CURE}"
        )


def _needed_by_adam(found: Set[str]) -> set[str]:
    """What the state of Adam and its kind has beside what was found: both moments, and the step."""
    every = {_FIRST_MOMENT, _SECOND_MOMENT, _STEP}
    return every if found <= every or _SECOND_MOMENT in found else set()


def _quoted(names: Sequence[str]) -> str:
    return some([repr(name) for name in names], _SHOWN)
