"""The archives of a stage checkpoint, opened and sorted by model-parallel rank; nothing may be missing.

    names in the folder --- files.StageFiles ---> for each model-parallel rank: model states, shards, experts

Does not live here: what is in them (`slices`). Called by `stages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.original.archive import load_archive
from deepspeed.checkpoint.original.files import ExpertOptimizerFile, OptimizerFile, StageFiles
from deepspeed.checkpoint.original.reading.completeness import CURE, check_experts, expert_ranks_of
from deepspeed.errors import CheckpointDamagedError

__all__ = ["ModelRank", "check_ranks", "open_model_ranks"]


@dataclass(frozen=True)
class ModelRank:
    """What the files of one model-parallel rank hold, by data-parallel rank."""

    name: str
    """Its first file, for messages."""

    models: list[Mapping[str, Any]]
    """Model states: one, or at ZeRO stage 3 one of each data-parallel rank."""

    shards: list[Mapping[str, Any]]
    """`optimizer_state_dict` of each data-parallel rank; none without ZeRO, or where the files were left out."""

    experts: list[Mapping[str, Any]] = field(default_factory=list)
    """State dict of each expert, by layer and global number."""

    expert_optimizers: list[Mapping[str, Any]] = field(default_factory=list)
    """`optimizer` of each expert-parallel rank at ZeRO stage 0."""

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are in the shards only (ZeRO stage 3)."""
        return len(self.models) > 1 or any("fp32_flat_groups" in shard for shard in self.shards)


def open_model_ranks(folder: Path, files: StageFiles) -> list[ModelRank]:
    """Open every archive except the layers of a pipeline.

    Raises:
        CheckpointDamagedError: files are missing, by the counts that the others state, or cannot be read.
        RefusedClassError: a file names something that is not plain data.
    """
    states = {file.name: load_archive(folder / file.name) for file in files.models}
    for name, content in states.items():
        if not isinstance(content, Mapping) or "module" not in content:
            raise CheckpointDamagedError(f"{folder / name} holds no model states: it has no key 'module'. Bring it again.")
    if not files.models:
        raise CheckpointDamagedError(f"{folder} has no *_model_states.pt of a rank, which holds the engine's state.")
    first = states[files.models[0].name]
    ranks = check_ranks(folder, "mp_rank", {file.model_rank for file in files.models}, first.get("mp_world_size"))
    if not files.layers and all(content["module"] is None for content in states.values()):
        raise CheckpointDamagedError(f"{folder} has no layer_*-model_states.pt, which hold the pipeline's weights. {CURE}")
    data_ranks = first.get("dp_world_size")
    opened = []
    for rank in ranks:
        models = [file for file in files.models if file.model_rank == rank]
        if models[0].data_rank is not None:
            check_ranks(folder, f"model states of mp_rank {rank}", {file.data_rank or 0 for file in models}, data_ranks)
        shards = _choose_precision([file for file in files.optimizers if file.model_rank == rank], first.get("ds_config"))
        if shards:
            check_ranks(folder, f"optimizer shards of mp_rank {rank}", {file.data_rank for file in shards}, data_ranks)
        expert_optimizers = [file for file in files.expert_optimizers if file.model_rank == rank]
        _check_expert_optimizers(folder, expert_optimizers, states[models[0].name])
        opened.append(
            ModelRank(
                name=models[0].name,
                models=[states[file.name] for file in models],
                shards=[_entry(folder / file.name, "optimizer_state_dict") for file in shards],
                experts=[load_archive(folder / file.name) for file in files.experts if file.model_rank == rank],
                expert_optimizers=[_entry(folder / file.name, "optimizer") for file in expert_optimizers],
            )
        )
    _check_across_ranks(folder, files, opened)
    return opened


def _check_across_ranks(folder: Path, files: StageFiles, ranks: Sequence[ModelRank]) -> None:
    lacking = [
        number for number, rank in enumerate(ranks) if not rank.shards and any(rank.models[0].get("param_shapes") or ())
    ]
    if lacking and any(rank.shards for rank in ranks):
        raise CheckpointDamagedError(
            f"{folder} lacks the optimizer shards of mp_rank {', '.join(map(str, lacking))} "
            f"(*zero_pp_rank_*_mp_rank_{lacking[0]:02d}_optim_states.pt), and has those of others. {CURE}"
        )
    try:
        check_experts(files.experts, next((rank.models[0] for rank in ranks if rank.models[0].get("num_experts")), {}))
    except CheckpointDamagedError as error:
        raise CheckpointDamagedError(f"checkpoint {folder}: {error}") from error


def _check_expert_optimizers(folder: Path, files: Sequence[ExpertOptimizerFile], model: Mapping[str, Any]) -> None:
    if files:
        count = expert_ranks_of(model.get("optimizer")) or None
        check_ranks(folder, "expp_rank (expp_rank_*_optim_states.pt)", {file.expert_rank for file in files}, count)


def _entry(path: Path, key: str) -> Mapping[str, Any]:
    content = load_archive(path)
    if not isinstance(content, Mapping) or not isinstance(content.get(key), Mapping):
        raise CheckpointDamagedError(f"{path} holds no optimizer state: it has no dictionary {key!r}. Bring it again.")
    found: Mapping[str, Any] = content[key]
    return found


def _choose_precision(files: Sequence[OptimizerFile], ds_config: Any) -> list[OptimizerFile]:
    """Shards of one precision: where both are there, one kind is left over from an earlier save under this tag."""
    kinds = {file.is_bf16 for file in files}
    block = ds_config.get("bf16", ds_config.get("bfloat16")) if isinstance(ds_config, Mapping) else None
    wanted = bool(isinstance(block, Mapping) and block.get("enabled")) if len(kinds) > 1 else kinds == {True}
    return [file for file in files if file.is_bf16 is wanted]


def check_ranks(folder: Path, what: str, found: set[int], stated: Any) -> list[int]:
    """The ranks 0, 1, ... in order, after checking that none is missing.

    Raises:
        CheckpointDamagedError: naming those that are.
    """
    count = stated if isinstance(stated, int) and stated > 0 else max(found) + 1
    missing = sorted(set(range(count)) - found)
    if missing:
        raise CheckpointDamagedError(
            f"{folder} lacks the {what} {', '.join(map(str, missing))}: {count} were saved. Bring the files together from "
            "every node that saved some (checkpoint.use_node_local_storage leaves each node with its own)."
        )
    return list(range(count))
