"""A checkpoint of the original as its pipeline layers and ranks, also seen as one of fewer ranks.

    layer_00               the embedding            get_embedding_state(tp_index)
    layer_01 ... layer_NN  transformer layers       get_transformer_state(tp_index, pp_index)
    the last one           the final norm           get_final_norm_state(tp_index)
    mp_rank_MM             model states             get_2d_parallel_state(tp_index, pp_index)
    zero_pp_rank_D_...     optimizer shards         get_zero_checkpoint_state(pp_index, tp_index, dp_index)

For tools that convert Megatron's checkpoints layer by layer. Slices of tensor ranks are joined as Megatron cuts them: norms
and the biases of row-parallel layers are whole everywhere, weights of row-parallel layers are cut along dimension 1, the
rest along 0.

Does not live here: parameters by name, for any layout and number of ranks (`opening.open_checkpoint`). Called by users.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.original.archive import check_archive, load_archive
from deepspeed.checkpoint.original.files import LayerFile, StageFiles
from deepspeed.checkpoint.original.published.merging import merge_state
from deepspeed.checkpoint.original.published.reshape import ModelDegrees, RankMap, reshape_meg_2d_parallel
from deepspeed.checkpoint.original.published.zero_checkpoint import ZeROCheckpoint, degrees_of
from deepspeed.errors import ArgumentError, CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from deepspeed.sharding import even_range

__all__ = ["DeepSpeedCheckpoint"]

_ROW_PARALLEL = re.compile(r"attention\.dense\.weight$|mlp\.dense_4h_to_h\.weight$")
_WHOLE = re.compile(r"norm\.(weight|bias)$|attention\.dense\.bias$|mlp\.dense_4h_to_h\.bias$|position_embeddings\.weight$")


class DeepSpeedCheckpoint:
    """The folder of one tag.

    Args:
        dir: the folder.
        tp_degree: tensor ranks to see it as, a divisor of those that wrote it; theirs if left out.
        pp_degree: the same for pipeline stages.
        dp_degree: the same for data ranks.
        final_layer_norm_idx: which layer file holds the final norm, counted as in a list.

    Raises:
        CheckpointNotFoundError: the folder holds no model states of the original.
        ArgumentError: the ranks cannot be merged so.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str],
        tp_degree: int | None = None,
        pp_degree: int | None = None,
        dp_degree: int | None = None,
        final_layer_norm_idx: int = -1,
    ) -> None:
        self.dir = str(dir)
        self.final_layer_norm_idx = final_layer_norm_idx
        files = StageFiles.of(path.name for path in Path(dir).iterdir())
        if not files.models:
            raise CheckpointNotFoundError(f"{dir} holds no *_model_states.pt of the original. Give the folder of a tag.")
        written = degrees_of(files)
        self.original_tp_degree, self.original_pp_degree = written.tp_degree, written.pp_degree
        self.original_dp_degree = written.dp_degree
        self.tp_degree = written.tp_degree if tp_degree is None else tp_degree
        self.pp_degree = written.pp_degree if pp_degree is None else pp_degree
        self.dp_degree = written.dp_degree if dp_degree is None else dp_degree
        self.mp_rank_files = [str(Path(dir, file.name)) for file in files.models if file.data_rank in (None, 0)]
        self.file_list = [str(Path(dir, name)) for name in files.names]
        self.zero_checkpoint = self._open_zero(files, written)
        self._layers = self._layers_of(files.layers)
        self._map: RankMap = reshape_meg_2d_parallel(written.pp_degree, written.tp_degree, self.pp_degree, self.tp_degree)

    @property
    def world_size(self) -> int:
        """Ranks that it is seen as."""
        return self.tp_degree * self.pp_degree * self.dp_degree

    @property
    def layer_keys(self) -> list[str]:
        """Names of the layers, in order."""
        return list(self._layers)

    @property
    def layer_files(self) -> list[str]:
        """Files of all layers."""
        return [file for files in self._layers.values() for file in files]

    def is_change_tp_degree(self) -> bool:
        """Whether other tensor ranks wrote it than it is seen as."""
        return self.tp_degree != self.original_tp_degree

    def is_change_pp_degree(self) -> bool:
        """Whether other pipeline stages wrote it than it is seen as."""
        return self.pp_degree != self.original_pp_degree

    def is_change_dp_degree(self) -> bool:
        """Whether other data ranks wrote it than it is seen as."""
        return self.dp_degree != self.original_dp_degree

    # -- layers -------------------------------------------------------------------------------------------------------

    def get_embedding_layer_id(self) -> str:
        """Name of the first layer."""
        return self._layer_at(0)

    def get_final_norm_layer_id(self) -> str:
        """Name of the layer with the final norm."""
        return self._layer_at(self.final_layer_norm_idx)

    def get_embedding_files(self, tp_index: int) -> list[str]:
        """Files that a tensor rank's embedding is made of."""
        return self._slices_of(self.get_embedding_layer_id(), tp_index)

    def get_embedding_state(self, tp_index: int) -> dict[str, Any]:
        """A tensor rank's embedding."""
        return _joined(self.get_embedding_files(tp_index))

    def get_final_norm_files(self, tp_index: int) -> list[str]:
        """Files that a tensor rank's final norm is made of."""
        return self._slices_of(self.get_final_norm_layer_id(), tp_index)

    def get_final_norm_state(self, tp_index: int) -> dict[str, Any]:
        """A tensor rank's final norm, which is the same on all."""
        return _joined(self.get_final_norm_files(tp_index)[:1])

    def get_pp_transformer_map(self, pp_index: int) -> list[str]:
        """Names of a stage's transformer layers: all between embedding and final norm, shared out evenly."""
        between = self.layer_keys[1 : self.layer_keys.index(self.get_final_norm_layer_id())]
        return between[slice(*even_range(len(between), self.pp_degree, pp_index))]

    def get_transformer_state(self, tp_index: int, pp_index: int) -> list[dict[str, Any]]:
        """A tensor rank's states of a stage's transformer layers."""
        return [_joined(self._slices_of(layer, tp_index)) for layer in self.get_pp_transformer_map(pp_index)]

    # -- ranks --------------------------------------------------------------------------------------------------------

    def get_2d_parallel_files(self, tp_index: int, pp_index: int) -> list[str]:
        """Model-state files that a place is made of."""
        return [self.mp_rank_files[number] for number in self._map.get_data(pp_index, tp_index)]

    def get_2d_parallel_state(self, tp_index: int, pp_index: int) -> dict[str, Any]:
        """Model states of a place; of several files joined by `merge_state`."""
        return reduce(merge_state, [load_archive(Path(file)) for file in self.get_2d_parallel_files(tp_index, pp_index)])

    def get_zero_files(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """Optimizer files that a rank's shard is made of."""
        return self._zero().get_files_for_rank(pp_index, tp_index, dp_index)

    def get_zero_checkpoint_state(
        self, pp_index: int, tp_index: int, dp_index: int, strip_tensor_paddings: bool = True
    ) -> dict[str, Any]:
        """A rank's optimizer shard; see `ZeROCheckpoint.get_state_for_rank`."""
        return self._zero().get_state_for_rank(pp_index, tp_index, dp_index, strip_tensor_paddings=strip_tensor_paddings)

    # -- the whole ----------------------------------------------------------------------------------------------------

    def get_iteration(self) -> int:
        """Iterations so far: what the client stored under `iteration`, else the global steps."""
        state = self._first_state()
        return int(state.get("iteration") or state.get("global_steps") or 0)

    def get_args(self) -> Any:
        """What the client stored under `args`, Megatron's command line; None where it did not."""
        return self._first_state().get("args")

    def get_checkpoint_info(self, info_key: str = "checkpoint_info") -> Any:
        """What the client stored under a key; None where it did not."""
        return self._first_state().get(info_key)

    def validate_files(self) -> None:
        """Look whether every file is whole.

        Raises:
            CheckpointDamagedError: naming every file that is not.
        """
        faults = [fault for file in self.file_list if (fault := check_archive(Path(file)))]
        if faults:
            raise CheckpointDamagedError(
                f"checkpoint {self.dir} is damaged: {'; '.join(faults)}. Bring the files again from where they were copied."
            )

    # -- parts --------------------------------------------------------------------------------------------------------

    def _open_zero(self, files: StageFiles, written: ModelDegrees) -> ZeROCheckpoint | None:
        if not files.optimizers:
            return None
        zero = ZeROCheckpoint(self.dir, written)
        zero.reshape(ModelDegrees(self.pp_degree, self.tp_degree, self.dp_degree))
        return zero

    def _layers_of(self, files: Sequence[LayerFile]) -> dict[str, list[str]]:
        layers: dict[str, list[str]] = {}
        for file in files:
            layers.setdefault(f"layer_{file.layer:02d}", []).append(str(Path(self.dir, file.name)))
        return layers

    def _layer_at(self, index: int) -> str:
        if not self._layers:
            raise CheckpointError(
                f"checkpoint {self.dir} has no layer files: no pipeline wrote it. Use deepspeed.checkpoint.open_checkpoint, "
                "which reads parameters by name."
            )
        if not -len(self._layers) <= index < len(self._layers):
            raise ArgumentError(f"final_layer_norm_idx={index}, but checkpoint {self.dir} has {len(self._layers)} layers.")
        return self.layer_keys[index]

    def _slices_of(self, layer: str, tp_index: int) -> list[str]:
        files = self._layers[layer]
        if not 0 <= tp_index < self.tp_degree:
            raise ArgumentError(f"tp_index={tp_index}, but checkpoint {self.dir} is seen as {self.tp_degree} tensor ranks.")
        return files[slice(*even_range(len(files), self.tp_degree, tp_index))] or files[:1]

    def _zero(self) -> ZeROCheckpoint:
        if self.zero_checkpoint is None:
            raise CheckpointNotFoundError(
                f"checkpoint {self.dir} has no optimizer shards: it was written without ZeRO. The optimizer's state is in "
                "get_2d_parallel_state(...)['optimizer']."
            )
        return self.zero_checkpoint

    def _first_state(self) -> dict[str, Any]:
        state: dict[str, Any] = load_archive(Path(self.mp_rank_files[0]))
        return state


def _joined(files: Sequence[str]) -> dict[str, Any]:
    """One layer from the slices of its tensor ranks."""
    states = [load_archive(Path(file)) for file in files]
    return {name: _join(name, [state[name] for state in states]) for name in states[0]}


def _join(name: str, slices: Sequence[Any]) -> Any:
    first = slices[0]
    if len(slices) == 1 or not isinstance(first, Tensor) or _WHOLE.search(name):
        return first
    return torch.cat(list(slices), dim=1 if _ROW_PARALLEL.search(name) else 0)
