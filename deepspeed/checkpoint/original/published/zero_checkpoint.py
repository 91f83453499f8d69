"""Optimizer shards of the original as files of ranks, also of fewer ranks than wrote them.

    ZeROCheckpoint(dir) --- reshape(fewer ranks) ---> get_state_for_rank: several ranks' shards joined into one

For tools that work file by file, as Megatron's do. Does not live here: parameters by name, for any layout and number of
ranks (`opening.open_checkpoint`). Called by users and `deepspeed_checkpoint`.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import reduce
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed.checkpoint.original.archive import load_archive
from deepspeed.checkpoint.original.files import StageFiles
from deepspeed.checkpoint.original.published.merging import merge_state
from deepspeed.checkpoint.original.published.reshape import ModelDegrees
from deepspeed.errors import CheckpointNotFoundError

__all__ = ["ZeROCheckpoint", "degrees_of"]

_INNER_STATES = ("base_optimizer_state", "optimizer_state_dict")
_PADDINGS = "group_paddings"
_OF_ONE_SHARD = ("param_slice_mappings", "param_alignment_paddings")
"""Keys with something per parameter of a shard, which means nothing in joined ones."""


def degrees_of(files: StageFiles) -> ModelDegrees:
    """Ranks that wrote a checkpoint, by its file names: the slices of a layer are tensor ranks, the rest stages."""
    model_ranks = len({f.model_rank for f in files.models} | {f.model_rank for f in files.optimizers}) or 1
    data_ranks = len({file.data_rank for file in files.optimizers}) or 1
    slices = len([file for file in files.layers if file.layer == files.layers[0].layer])
    tensor_ranks = slices or model_ranks
    return ModelDegrees(max(1, model_ranks // tensor_ranks), tensor_ranks, data_ranks)


class ZeROCheckpoint:
    """The optimizer shards in the folder of one tag.

    Args:
        dir: the folder.
        source_3d: ranks that wrote it; found by the file names if left out.

    Raises:
        CheckpointNotFoundError: there are none.
    """

    def __init__(self, dir: str | os.PathLike[str], source_3d: ModelDegrees | None = None) -> None:
        self.dir = str(dir)
        files = StageFiles.of(path.name for path in Path(dir).iterdir())
        by_place = sorted(files.optimizers, key=lambda file: (file.data_rank, file.model_rank))
        if not by_place:
            raise CheckpointNotFoundError(f"{dir} holds no optimizer shards (*_optim_states.pt). Give the folder of a tag.")
        self.file_list = [str(Path(dir, file.name)) for file in by_place]
        self.num_files = len(self.file_list)
        self.src_3d = source_3d or degrees_of(files)
        self.reshape(self.src_3d)

    def reshape(self, target_3d_desc: ModelDegrees) -> None:
        """See the shards as those of fewer ranks.

        Raises:
            ArgumentError: the ranks cannot be merged so.
        """
        self._maps = self.src_3d.reshape(target_3d_desc)
        self.target_3d = target_3d_desc

    def get_src_world_size(self) -> int:
        """Ranks that wrote the checkpoint."""
        return self.src_3d.world_size()

    def get_src_pp_degree(self) -> int:
        """Pipeline stages that wrote it."""
        return self.src_3d.pp_degree

    def get_src_tp_degree(self) -> int:
        """Tensor ranks that wrote it."""
        return self.src_3d.tp_degree

    def get_src_dp_degree(self) -> int:
        """Data ranks that wrote it."""
        return self.src_3d.dp_degree

    def get_file_indices_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[int]:
        """Places in `file_list` of what a rank's shard is made of."""
        return self._maps[dp_index].get_data(pp_index, tp_index)

    def get_files_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """Files that a rank's shard is made of."""
        return [self.file_list[number] for number in self.get_file_indices_for_rank(pp_index, tp_index, dp_index)]

    def get_state_for_rank(
        self,
        pp_index: int,
        tp_index: int,
        dp_index: int,
        keys_to_ignore: Collection[str] = (),
        strip_tensor_paddings: bool = True,
    ) -> dict[str, Any]:
        """A rank's shard; of several files one after another, without what describes the single ones.

        Args:
            pp_index: pipeline stage.
            tp_index: tensor rank.
            dp_index: data rank.
            keys_to_ignore: keys of the optimizer's state that are left out.
            strip_tensor_paddings: leave out the padding at the end of the flat tensors.
        """
        states = []
        files = self.get_files_for_rank(pp_index, tp_index, dp_index)
        for file in files:
            state: dict[str, Any] = load_archive(Path(file))
            optimizer = state["optimizer_state_dict"]
            for key in (*keys_to_ignore, *(_OF_ONE_SHARD if len(files) > 1 else ())):
                optimizer.pop(key, None)
            if strip_tensor_paddings:
                _strip_paddings(optimizer)
            states.append(state)
        return reduce(merge_state, states)


def _strip_paddings(optimizer: dict[str, Any]) -> None:
    """Cut the padding off each group's flat tensors, and say that there is none."""
    paddings = optimizer.get(_PADDINGS)
    if not isinstance(paddings, list):
        return
    inner: dict[str, Any] = next((optimizer[key] for key in _INNER_STATES if key in optimizer), {})
    for number, padding in enumerate(paddings):
        entry = inner.get("state", {}).get(number, {})
        entry.update((k, v[: v.numel() - padding]) for k, v in entry.items() if isinstance(v, Tensor) and v.dim() == 1)
    optimizer[_PADDINGS] = [0] * len(paddings)
