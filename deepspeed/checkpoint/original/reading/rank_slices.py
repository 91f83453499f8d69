"""One model-parallel rank's archives as a `Slice`: which reader takes the optimizer, which names are tied, frozen, buffers.

Does not live here: the readers (`slices`, `unsharded`), experts' names (`experts`). Called by `stages`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from deepspeed.checkpoint.original.engine_state import plain_module, zero_stage_of
from deepspeed.checkpoint.original.reading.completeness import (
    check_trained_layers,
    check_weights,
    expert_ranks_of,
)
from deepspeed.checkpoint.original.reading.experts import ExpertNames
from deepspeed.checkpoint.original.reading.model_ranks import ModelRank
from deepspeed.checkpoint.original.reading.pipeline import stage_layers
from deepspeed.checkpoint.original.reading.slices import Slice, read_sharded, read_weights, stored
from deepspeed.checkpoint.original.reading.unsharded import UnnamedEntries, entries_of, name_entries
from deepspeed.errors import CheckpointDamagedError, CheckpointError

__all__ = ["read_rank", "read_unsharded_pipeline"]

_NO_SHARDS = CheckpointDamagedError("there are no *_optim_states.pt, which hold the optimizer's state")


def read_rank(rank: ModelRank, members: Sequence[Sequence[str]] | None) -> Slice:
    """Everything that a model-parallel rank stored; see `StageSource` for `members`."""
    model = rank.models[0]
    buffers = set(model.get("buffer_names") or ())
    module = plain_module(model)
    parameters = {name: value for name, value in module.items() if name not in buffers}
    aliases = model.get("shared_params")
    aliases = dict(aliases) if aliases is not None else _aliases_of(parameters)
    owned = {name: value for name, value in parameters.items() if name not in aliases}
    into = _read_optimizer(rank, owned, members)
    into.aliases = aliases
    into.dtypes = {name: value.dtype for name, value in module.items()}
    into.weights = read_weights(rank.models, aliases)
    into.weights.update({name: stored(value) for state in rank.experts for name, value in state.items()})
    shapes = {name: weight.shape for name, weight in into.weights.items()}
    shapes.update((alias, shapes[owner]) for alias, owner in aliases.items() if owner in shapes)
    check_weights(model, shapes, is_sharded=rank.is_sharded)
    stage = 3 if rank.is_sharded else int(rank.shards[0].get("zero_stage") or 1) if rank.shards else 0
    _tell_frozen(into, model, buffers, stage)
    return into


def _read_optimizer(rank: ModelRank, owned: Mapping[str, Tensor], members: Sequence[Sequence[str]] | None) -> Slice:
    model = rank.models[0]
    if rank.shards:
        names = [name for shapes in model.get("param_shapes") or () for name in shapes]
        config = model.get("ds_config")
        is_data_first = isinstance(config, Mapping) and bool(config.get("use_data_before_expert_parallelism"))
        into = read_sharded(model, rank.shards, ExpertNames.of(names, is_data_first=is_data_first))
    elif rank.is_sharded:
        raise CheckpointDamagedError(f"{rank.name} has no weights at ZeRO stage 3, and there are no *_optim_states.pt.")
    elif _lost_shards(model):
        into = Slice(refusal=_NO_SHARDS)
    elif model.get("optimizer") is None:
        return Slice(has_optimizer=False)
    else:
        into = _read_unsharded(rank, owned, members)
    into.has_optimizer = True
    return into


def _lost_shards(model: Mapping[str, Any]) -> bool:
    """Whether the optimizer's state lay in shards, of a rank that has none."""
    return zero_stage_of(model.get("ds_config")) > 0 and any(model.get("param_shapes") or ())


def _read_unsharded(rank: ModelRank, owned: Mapping[str, Tensor], members: Sequence[Sequence[str]] | None) -> Slice:
    groups: list[dict[str, Any]] = []
    try:
        unnamed = entries_of(rank.models[0]["optimizer"])
        groups = unnamed.groups
        if rank.expert_optimizers:
            return _read_unsharded_experts(rank, owned)
        if expert_ranks_of(rank.models[0]["optimizer"]):
            raise CheckpointDamagedError("there are no expp_rank_*_optim_states.pt, which hold the state of the experts")
        return name_entries(unnamed, members, owned)
    except CheckpointError as error:
        return Slice(groups=groups, members=[[] for _ in groups], refusal=error)


def _read_unsharded_experts(rank: ModelRank, dense: Mapping[str, Tensor]) -> Slice:
    """Without ZeRO every expert-parallel rank stored its whole optimizer: dense parameters, then its experts."""
    into = Slice()
    for expert_rank, optimizer in enumerate(rank.expert_optimizers):
        unnamed = entries_of(optimizer)
        is_expert = [bool(group.get("moe")) for group in unnamed.groups]
        if sum(is_expert) != 1 or len(unnamed.groups) != 2:
            raise CheckpointError(
                f"the optimizer has {sum(is_expert)} groups of experts and {len(is_expert) - sum(is_expert)} others; "
                "without ZeRO its state is read for one of each"
            )
        experts = dict(_of_rank(rank.experts, expert_rank, len(rank.expert_optimizers)))
        members = [list(experts if moe else dense) for moe in is_expert]
        part = name_entries(unnamed, members, {**dense, **experts})
        into.groups = part.groups
        into.members = _union(into.members, part.members)
        into.add(part)
    return into


def _of_rank(experts: Sequence[Mapping[str, Tensor]], expert_rank: int, ranks: int) -> Iterable[tuple[str, Tensor]]:
    """Parameters of the experts of one expert-parallel rank: of every layer an equal share, in order."""
    names = [name for state in experts for name in state]
    of_layer = ExpertNames.of(names).locals_of
    for state in experts:
        for name, value in state.items():
            prefix = next(prefix for prefix in of_layer if name.startswith(prefix))
            number = int(name.removeprefix(prefix).split(".")[0])
            if number // (of_layer[prefix] // ranks) == expert_rank:
                yield name, value


def _union(members: Sequence[Sequence[str]], more: Sequence[Sequence[str]]) -> list[list[str]]:
    if not members:
        return [list(names) for names in more]
    return [list(dict.fromkeys([*names, *others])) for names, others in zip(members, more, strict=True)]


def read_unsharded_pipeline(
    ranks: Sequence[ModelRank], layers: Mapping[int, Sequence[Mapping[str, Tensor]]], degree: int
) -> list[Slice]:
    """The optimizer's state of a pipeline without ZeRO; the weights are those of the layers.

    Args:
        ranks: the model-parallel ranks.
        layers: layer number -> state dict of each tensor-parallel rank.
        degree: tensor-parallel ranks.
    """
    slices = [Slice(has_optimizer=rank.models[0].get("optimizer") is not None) for rank in ranks]
    if _lost_shards(ranks[0].models[0]):
        return [Slice(refusal=_NO_SHARDS, has_optimizer=True) for _ in ranks]
    unnamed = [entries_of(rank.models[0]["optimizer"]) for rank in ranks if rank.models[0].get("optimizer") is not None]
    if len(unnamed) < len(ranks):
        return slices
    shapes = {layer: [tuple(value.shape) for value in states[0].values()] for layer, states in layers.items()}
    stages = stage_layers(shapes, [[entry.shape for entry in stage.entries] for stage in unnamed[::degree]])
    check_trained_layers(shapes, [[entry.state for entry in stage.entries] for stage in unnamed[::degree]])
    if stages is None or any(len(stage.groups) != 1 for stage in unnamed):
        for each in slices:
            each.refusal = CheckpointError(
                "a pipeline without ZeRO stores the optimizer's state by number, and the layers fit the numbers in no way "
                "or in several (frozen parameters, several parameter groups, or tied layers)"
            )
        return slices
    for number, stage in enumerate(unnamed):
        extra, own = stages[number // degree]
        weights = {f"{layer}.{key}": v for layer in own for key, v in layers[layer][number % degree].items()}
        rest = UnnamedEntries(stage.entries[extra:], stage.groups)
        slices[number] = name_entries(rest, [list(weights)], weights)
        slices[number].has_optimizer = True
    return slices


def _aliases_of(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Tied parameters without a list of them: names that share their elements."""
    first: dict[tuple[Any, ...], str] = {}
    aliases = {}
    for name, value in parameters.items():
        if value.numel():
            owner = first.setdefault((value.data_ptr(), tuple(value.shape), value.stride(), value.dtype), name)
            if owner != name:
                aliases[name] = owner
    return aliases


def _tell_frozen(into: Slice, model: Mapping[str, Any], buffers: set[str], stage: int) -> None:
    """Frozen parameters are listed from stage 2 on, unless they were left out of the checkpoint; else they are the rest."""
    stated = model.get("frozen_param_shapes")
    if stated is not None:
        into.frozen = list(stated)
        into.has_frozen = all(name in into.weights for name in stated)
    elif stage > 1 and "frozen_param_shapes" in model:
        into.has_frozen = False
    elif into.refusal is None and into.has_optimizer:
        trained = into.masters or into.scalars
        into.frozen = [name for name in into.weights if name not in trained and name not in buffers]
