"""Any checkpoint as the original's stage files, from which it resumes.

    CheckpointSource --- weights sorted by kind ---> per rank: model states, optimizer shard ---> .<tag>.converting-.../
                                                                 commit: rename ---> <tag>/, then `latest` names it

    stage 0      mp_rank_00_model_states.pt                    with the whole optimizer
    stages 1, 2  mp_rank_00_model_states.pt                    [bf16_]zero_pp_rank_D_mp_rank_00_optim_states.pt
    stage 3      zero_pp_rank_D_mp_rank_00_model_states.pt     [bf16_]zero_pp_rank_D_mp_rank_00_optim_states.pt

Elements go from the source to the file block by block: memory is a few blocks and the metadata, whatever the model.
The original resumes at the ZeRO stage, number of ranks, precision, groups and `sub_group_size` that the files were written
for; from our own layout, and from a universal one, that restriction does not exist.

Does not live here: what model states (`model_states`) and optimizer shards (`optimizer_shards`) look like.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.checkpoint.disk.names import LATEST_FILE, new_tag_folder
from deepspeed.checkpoint.disk.storage import Storage
from deepspeed.checkpoint.original.pickles import save_archive
from deepspeed.checkpoint.original.scaler_states import scaler_record
from deepspeed.checkpoint.original.stand_ins import LossScaler, ZeroStageEnum
from deepspeed.checkpoint.original.writing.conversion_folder import point_to, written_aside
from deepspeed.checkpoint.original.writing.model_states import (
    LAYOUT_VERSION,
    model_file,
    model_states_of,
    sharded_model_states_of,
)
from deepspeed.checkpoint.original.writing.optimizer_shards import (
    DEFAULT_SUB_GROUP_NUMEL,
    FlatShard,
    SourceOptimizer,
    cut_into_sub_groups,
    flat_shards,
    padded_shards,
)
from deepspeed.checkpoint.original.writing.weights import Weights, config_dtype, sort_weights
from deepspeed.checkpoint.source import CheckpointSource
from deepspeed.common.logging import get_logger
from deepspeed.errors import ArgumentError, CheckpointError

__all__ = ["Precision", "Progress", "ZeroStage", "write_stages"]

ZeroStage = Literal[0, 1, 2, 3]
Precision = Literal["fp32", "bf16", "fp16"]

Progress = Callable[[int, int], None]
"""`progress(files written, files in all)`."""

_DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_EXPERTS = ".deepspeed_moe.experts."
_TIED_LAYERS = "tied_modules."

_File = tuple[str, Callable[[], dict[str, Any]]]
"""Name of a file, and what makes its content."""

_logger = get_logger(__name__)


def write_stages(
    source: CheckpointSource,
    output_dir: str | os.PathLike[str],
    tag: str | None = None,
    *,
    stage: ZeroStage,
    world_size: int,
    dtype: Precision | None = None,
    with_latest: bool = True,
    progress: Progress | None = None,
    storage: Storage | None = None,
) -> Path:
    """Write a checkpoint that the original resumes from. Not collective: one process calls it.

    Args:
        source: what to convert.
        output_dir: folder of all tags.
        tag: name of the new one; the source's if left out.
        stage: ZeRO stage that the original will run.
        world_size: data-parallel ranks that it will run on.
        dtype: precision of its model; that of the source's configuration if left out.
        with_latest: let `latest` name the tag.
        progress: told after each file.
        storage: the file system.

    Returns:
        The new folder.

    Raises:
        ArgumentError: a value is unusable, or there is a folder of that tag.
        CheckpointError: the source has something that this layout, or that stage of it, cannot hold; or the
            system refused, e.g. a full disk. Nothing is left of the new folder then.
    """
    storage = storage or Storage()
    output = new_tag_folder(Path(output_dir).absolute(), source.tag if tag is None else tag)
    if output.exists():
        raise ArgumentError(f"{output} exists already. Remove it, or give another tag or output folder.")
    files = _plan(source, stage, world_size, dtype)
    with written_aside(output, storage) as working:
        for number, (name, content) in enumerate(files, start=1):
            save_archive(content(), working / name)
            if progress is not None:
                progress(number, len(files))
    if with_latest:
        name = output.relative_to(Path(output_dir).absolute()).as_posix()
        point_to(Path(output_dir).absolute() / LATEST_FILE, name, storage)
    return output


def _plan(source: CheckpointSource, stage: int, world_size: int, dtype: str | None) -> list[_File]:
    """All files; everything that can be refused is refused here or by the first file of its kind."""
    if stage not in get_args(ZeroStage) or world_size < 1 or dtype not in (None, *_DTYPES):
        raise ArgumentError(
            f"write_stages(stage={stage!r}, world_size={world_size!r}, dtype={dtype!r}): the ZeRO stage must be 0 to 3, the "
            f"number of ranks at least 1, and the precision one of {', '.join(_DTYPES)} or None."
        )
    model_dtype = config_dtype(source.state["ds_config"]) if dtype is None else _DTYPES[dtype]
    weights = _in_precision(source, sort_weights(source), model_dtype)
    _check_kind(source, weights)
    return list(_Export(source, weights, stage, world_size, model_dtype).files())


def _in_precision(source: CheckpointSource, weights: Weights, dtype: torch.dtype) -> Weights:
    """The weights with the model's types: floats in `dtype`, everything else and buffers as they are."""
    as_stored = {name: source.dtype(weights.tensors[name]) for name in weights.tensors}
    casts = {name for name in [*weights.trained, *weights.frozen] if as_stored[name].is_floating_point}
    return replace(weights, dtypes={name: dtype if name in casts else stored for name, stored in as_stored.items()})


def _check_kind(source: CheckpointSource, weights: Weights) -> None:
    """
    Raises:
        CheckpointError: a pipeline's or experts' checkpoint, which the original keeps in files of their own.
    """
    for mark, kind in ((_EXPERTS, "experts"), (_TIED_LAYERS, "a pipeline's layers")):
        found = next((name for name in weights.tensors if mark in name), None)
        if found is not None:
            raise CheckpointError(
                f"checkpoint {source.folder} holds {kind} (for example {found!r}), for which the original has files of "
                "another form that this version reads but does not write. Use ds_to_universal, which writes any weights."
            )


@dataclass(frozen=True)
class _Export:
    """One conversion: the source, and what the original's engine will be that resumes from it."""

    source: CheckpointSource
    weights: Weights
    stage: int
    world_size: int
    dtype: torch.dtype

    def files(self) -> Iterator[_File]:
        """Every file, the optimizer's first: most of what can be refused is refused there."""
        optimizer = self._optimizer()
        if self.stage == 0:
            yield model_file(), partial(self._unsharded, optimizer)
            return
        if optimizer is None:
            raise CheckpointError(
                f"checkpoint {self.source.folder} was saved without an optimizer, whose weights are what the original's "
                f"files of ZeRO stage {self.stage} hold. Export for ZeRO stage 0."
            )
        shards = self._padded_shards(optimizer) if self.stage == 3 else self._flat_shards(optimizer)
        yield from ((self._optimizer_file(rank), partial(shard, rank)) for rank, shard in enumerate(shards))
        if self.stage == 3:
            sub_grouped = replace(self.weights, groups=[names for group in self._sub_groups(optimizer) for names in group])
            for rank in range(self.world_size):
                yield model_file(rank), partial(self._sharded, sub_grouped, rank)
        else:
            yield model_file(), self._whole

    # -- model states -------------------------------------------------------------------------------------------------

    def _unsharded(self, optimizer: SourceOptimizer | None) -> dict[str, Any]:
        without_zero = dict.fromkeys(("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"))
        state = None if optimizer is None else self._unsharded_optimizer(optimizer)
        return self._stated(model_states_of(self.source, self.weights)) | without_zero | {"optimizer": state}

    def _whole(self) -> dict[str, Any]:
        content = self._stated(model_states_of(self.source, self.weights))
        if self.stage == 1:  # the original fills these from stage 2 on
            content |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
        return content

    def _sharded(self, weights: Weights, rank: int) -> dict[str, Any]:
        return self._stated(sharded_model_states_of(self.source, weights, rank, self.world_size))

    def _stated(self, content: dict[str, Any]) -> dict[str, Any]:
        content.pop(UNIVERSAL_CHECKPOINT_INFO, None)  # the original writes it for models that state it only
        return content | {"dp_world_size": self.world_size, "ds_config": self._ds_config()}

    # -- optimizer ----------------------------------------------------------------------------------------------------

    def _optimizer(self) -> SourceOptimizer | None:
        state = self.source.state["optimizer"]
        return None if state is None else SourceOptimizer(self.source, self.weights, state)

    def _optimizer_file(self, rank: int) -> str:
        prefix = "bf16_" if self.dtype == torch.bfloat16 else ""
        return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def _unsharded_optimizer(self, optimizer: SourceOptimizer) -> dict[str, Any]:
        """fp32: the inner optimizer's state. 16-bit: that of the original's wrapper around an optimizer of torch."""
        inner = optimizer.whole_state()
        if self.dtype == torch.float32:
            return inner
        scaler = vars(self._scaler())
        moving = ("last_overflow_iter", "scale_factor", "scale_window")
        return {
            "dynamic_loss_scale": scaler["dynamic"],
            "cur_scale": scaler["cur_scale"],
            "cur_iter": self.source.state["global_steps"],
            **{key: scaler[key] for key in moving if key in scaler},
            "optimizer_state_dict": inner,
            "fp32_groups": optimizer.whole_masters(),
        }

    def _flat_shards(self, optimizer: SourceOptimizer) -> list[Callable[[int], dict[str, Any]]]:
        """What makes each rank's optimizer shard at stages 1 and 2."""
        groups = self.weights.groups
        shards = [flat_shards(optimizer.numels(names), self.world_size) for names in groups]

        def content(rank: int) -> dict[str, Any]:
            own = [of_group[rank] for of_group in shards]
            return self._optimizer_content(
                {
                    "clip_grad": float((self.source.state["ds_config"] or {}).get("gradient_clipping") or 0.0),
                    "base_optimizer_state": optimizer.flat_state(list(zip(groups, own, strict=True)), [1] * len(groups)),
                    "single_partition_of_fp32_groups": [
                        optimizer.flat_master(shard, shard.numel - shard.padding_numel) for shard in own
                    ],
                    "group_paddings": [shard.padding_numel for shard in own],
                    "param_alignment_paddings": [[0] * len(names) for names in groups],
                    "partition_count": [self.world_size] * len(groups),
                    "ds_version": LAYOUT_VERSION,
                    "param_slice_mappings": [shard.slice_mapping for shard in own],
                }
            )

        return [content] * self.world_size

    def _padded_shards(self, optimizer: SourceOptimizer) -> list[Callable[[int], dict[str, Any]]]:
        """What makes each rank's optimizer shard at stage 3."""
        sub_groups = self._sub_groups(optimizer)
        counts = [len(group) for group in sub_groups]
        flat = [names for group in sub_groups for names in group]
        shards = [padded_shards(optimizer.numels(names), self.world_size) for names in flat]

        def content(rank: int) -> dict[str, Any]:
            own: list[FlatShard] = [of_sub_group[rank] for of_sub_group in shards]
            return self._optimizer_content(
                {
                    "partition_count": self.world_size,
                    "optimizer_state_dict": optimizer.flat_state(list(zip(flat, own, strict=True)), counts),
                    "fp32_flat_groups": [optimizer.flat_master(shard, shard.numel) for shard in own],
                }
            )

        return [content] * self.world_size

    def _optimizer_content(self, state: dict[str, Any]) -> dict[str, Any]:
        scaler = self._scaler()
        common = {
            "zero_stage": ZeroStageEnum(self.stage),
            "loss_scaler": scaler,
            "dynamic_loss_scale": bool(vars(scaler)["dynamic"]),
            "overflow": False,
        }
        return {"optimizer_state_dict": common | state, "ds_config": self._ds_config(), "ds_version": LAYOUT_VERSION}

    def _sub_groups(self, optimizer: SourceOptimizer) -> list[list[list[str]]]:
        """Names of each sub-group of each group."""
        stated = _block(self.source.state["ds_config"], "zero_optimization").get("sub_group_size")
        numel = DEFAULT_SUB_GROUP_NUMEL if stated is None else int(stated)
        return [cut_into_sub_groups(optimizer.numels(names), self.world_size, numel) for names in self.weights.groups]

    def _scaler(self) -> LossScaler:
        """The source's, where both are fp16; a fresh one where only the export is."""
        state, ds_config = self.source.state["loss_scaler"], self.source.state["ds_config"]
        if self.dtype != torch.float16:
            return scaler_record({}, ds_config)
        if config_dtype(ds_config) != torch.float16:
            power = _block(ds_config, "fp16").get("initial_scale_power", 16)
            state = {"scale": 2.0**power, "good_steps": 0}
        return scaler_record(state, ds_config, self.source.state["global_steps"])

    def _ds_config(self) -> dict[str, Any]:
        """The source's configuration with what the export decides: ZeRO stage and precision."""
        config = _plain(self.source.state["ds_config"] or {})
        zero = {**_block(config, "zero_optimization"), "stage": self.stage}
        if zero.pop("round_robin_gradients", False):
            _logger.warning(
                "the export has the parameters in their own order: resume the original with round_robin_gradients=false."
            )
        blocks = {"bf16": torch.bfloat16, "fp16": torch.float16}
        precision = {key: {**_block(config, key), "enabled": self.dtype == dtype} for key, dtype in blocks.items()}
        kept = {key: value for key, value in precision.items() if value["enabled"] or key in config}
        config.pop("bfloat16", None)  # the other spelling of the block
        return {**config, "zero_optimization": zero, **kept}


def _block(config: Mapping[str, Any] | None, key: str) -> Mapping[str, Any]:
    block = (config or {}).get(key)
    return block if isinstance(block, Mapping) else {}


def _plain(value: Any) -> Any:
    """Plain containers, as JSON has them."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
