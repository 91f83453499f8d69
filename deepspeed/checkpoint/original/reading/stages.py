"""Stage files of the original as a `CheckpointSource`.

    mp_rank_00 ... mp_rank_NN   --- model_ranks ---> archives, mapped
    each model-parallel rank    --- slices (ZeRO), unsharded (none) ---> Slice: names, values, optimizer state
    tensor-parallel slices      --- tensor_parallel ---> whole tensors
    pipeline stages, layers     --- pipeline ---> one table of global names

Everything is put together when it is read; opening reads the archives' metadata only. Does not live here: any of the steps.
Called by `opening`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.agreement import Ranks
from deepspeed.checkpoint.disk.names import master_tensor, module_tensor, optimizer_tensor
from deepspeed.checkpoint.original.archive import load_archive
from deepspeed.checkpoint.original.engine_state import client_state_of, engine_state_of, loss_scaler_of
from deepspeed.checkpoint.original.files import StageFiles
from deepspeed.checkpoint.original.reading.assembled import Stored, TensorTable
from deepspeed.checkpoint.original.reading.completeness import (
    check_layer_slices,
    check_optimizer_state,
    check_same_names,
    check_trained_names,
)
from deepspeed.checkpoint.original.reading.model_ranks import ModelRank, open_model_ranks
from deepspeed.checkpoint.original.reading.pipeline import layer_names
from deepspeed.checkpoint.original.reading.rank_slices import read_rank, read_unsharded_pipeline
from deepspeed.checkpoint.original.reading.share_check import check_share
from deepspeed.checkpoint.original.reading.slices import Slice, stored
from deepspeed.checkpoint.original.reading.tensor_parallel import TensorParallelRules
from deepspeed.checkpoint.original.reading.unsharded import unsharded_scaler
from deepspeed.checkpoint.source import EngineState, OptimizerState
from deepspeed.common.logging import get_logger
from deepspeed.errors import CheckpointDamagedError, CheckpointError

__all__ = ["StageSource"]

_logger = get_logger(__name__)

_OPTIMIZER = optimizer_tensor("", "")[:-1]


class StageSource:
    """Stage files of the original, open for reading; see `CheckpointSource`.

    Args:
        folder: the tag's folder.
        tag: its name.
        ranks: which share of the files this rank checks.
        members: names of each parameter group's parameters in the optimizer's order. Needed only to name the optimizer's
            entries of a checkpoint without ZeRO whose model has frozen parameters or several groups.

    Raises:
        CheckpointDamagedError: files are missing or do not belong together.
        CheckpointError: the checkpoint is of a kind that cannot be put together; the text says why.
    """

    def __init__(self, folder: Path, tag: str, ranks: Ranks, members: Sequence[Sequence[str]] | None = None) -> None:
        self.folder = folder
        self.tag = tag
        self._ranks = ranks
        self._files = StageFiles.of(path.name for path in folder.iterdir())
        model_ranks = open_model_ranks(folder, self._files)
        self._models = [rank.models[0] for rank in model_ranks]
        with _about(folder):
            whole, loss_scaler = _put_together(folder, self._files, model_ranks, members)
        self._refusal = whole.refusal
        is_lost = isinstance(whole.refusal, CheckpointDamagedError)
        self._is_numbered = whole.has_optimizer and not is_lost and not any(rank.shards for rank in model_ranks)
        self._tensors = TensorTable(folder)
        _fill(self._tensors, whole)
        self._state = _state_of(whole, self._models, model_ranks[0], loss_scaler)
        if is_lost and ranks.rank == 0:
            dtypes = sorted({str(weight.dtype) for weight in whole.weights.values() if weight.dtype.is_floating_point})
            _logger.warning(
                "checkpoint %s: %s. Its weights are read as the model held them (%s), without fp32 copies.",
                folder,
                whole.refusal,
                ", ".join(dtypes),
            )

    def with_members(self, members: Sequence[Sequence[str]]) -> StageSource:
        """The same checkpoint with the names of each group known; itself where they are not needed or do not fit."""
        if not self._is_numbered:
            return self
        named = StageSource(self.folder, self.tag, self._ranks, members)
        return self if named._refusal is not None and self._refusal is None else named

    @property
    def state(self) -> EngineState:
        """What the engine stored besides tensors."""
        return self._state

    def client_state(self) -> dict[str, Any]:
        """What the user stored, anew at each call; tensors are on the CPU."""
        return client_state_of(self._models[0])

    def rank_state(self, rank: int) -> dict[str, Any]:
        """Nothing: this layout stores no state per rank."""
        return {}

    def names(self, prefix: str = "") -> list[str]:
        """Names of all tensors that start with `prefix`, sorted.

        Raises:
            CheckpointDamagedError: the optimizer's tensors are asked for, and their files are lost.
            CheckpointError: they cannot be given for another reason; the text says why.
        """
        if self._refusal is not None and prefix.startswith(_OPTIMIZER):
            raise type(self._refusal)(
                f"checkpoint {self.folder}: {self._refusal}. Pass load_optimizer_states=False to load everything else."
            )
        return self._tensors.names(prefix)

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of a tensor."""
        return self._tensors.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a tensor on the disk."""
        return self._tensors.dtype(name)

    def read(self, name: str, start: int = 0, length: int | None = None, out: Tensor | None = None) -> Tensor:
        """Read a range of a flattened tensor; see `CheckpointSource.read`."""
        return self._tensors.read(name, start, length, out)

    def cut(self, name: str) -> None:
        """None: tensors are put together as they are read."""

    def read_stored(self, name: str, start: int, out: Tensor) -> Tensor:
        """As `read`."""
        return self.read(name, start, out=out)

    def check_own_share(self) -> None:
        """Compare this rank's share of the files with the checksums in them. Not collective.

        Raises:
            CheckpointDamagedError: naming every file that is missing, cut short or changed.
        """
        check_share(self.folder, [self.folder / name for name in self._files.names], self._ranks)


@contextmanager
def _about(folder: Path) -> Iterator[None]:
    """Errors name the folder, and a structure that is not the format's is damage."""
    try:
        yield
    except CheckpointDamagedError as error:
        raise CheckpointDamagedError(f"checkpoint {folder}: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {folder}: {error}") from error
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointDamagedError(
            f"checkpoint {folder} is not built as version 0.19 of the original builds it ({type(error).__name__}: {error})."
        ) from error


def _put_together(
    folder: Path, files: StageFiles, ranks: Sequence[ModelRank], members: Sequence[Sequence[str]] | None
) -> tuple[Slice, Mapping[str, Any]]:
    """The whole model from all model-parallel ranks, and the loss scaler's state."""
    first = ranks[0].models[0]
    layers = _open_layers(folder, files)
    degree = _tensor_parallel_degree(first, layers, len(ranks))
    check_layer_slices(layers, degree)
    rules = TensorParallelRules(first.get("universal_checkpoint_info"), degree)
    if layers and not any(rank.shards for rank in ranks):
        slices = read_unsharded_pipeline(ranks, layers, degree)
    else:
        slices = [read_rank(rank, members) for rank in ranks]
    whole = Slice()
    for stage in range(len(ranks) // degree):
        _merge(whole, _join(slices[stage * degree : (stage + 1) * degree], rules))
    if any(rank.shards for rank in ranks):
        _check_state(whole, first)
    if layers:
        _add_layers(whole, layers, rules, [rank.models[0] for rank in ranks[::degree]])
    return whole, loss_scaler_of(ranks[0].shards[0] if ranks[0].shards else unsharded_scaler(first.get("optimizer") or {}))


def _add_layers(
    whole: Slice,
    layers: Mapping[int, Sequence[Mapping[str, Tensor]]],
    rules: TensorParallelRules,
    stages: Sequence[Mapping[str, Any]],
) -> None:
    """Add a pipeline's weights; `stages` are the model states of each stage's first tensor-parallel rank."""
    shapes = {layer: {key: tuple(value.shape) for key, value in states[0].items()} for layer, states in layers.items()}
    trained = {
        n: tuple(shape) for states in stages for group in states.get("param_shapes") or () for n, shape in group.items()
    }
    names = layer_names(shapes, trained)
    check_trained_names(trained, [name for of_layer in names.values() for name in of_layer.values()])
    for layer, of_tensor_ranks in layers.items():
        check_same_names(f"tensor in its file of layer {layer}", [state.keys() for state in of_tensor_ranks])
        for key, name in names[layer].items():
            whole.weights[name] = rules.join(name, [stored(state[key]) for state in of_tensor_ranks])


def _check_state(whole: Slice, model: Mapping[str, Any]) -> None:
    check_optimizer_state(
        whole.groups,
        whole.members,
        {name: whole.optimizer.get(name, {}).keys() | whole.scalars.get(name, {}).keys() for name in whole.masters},
        dims={name: len(master.shape) for name, master in whole.masters.items()},
        may_lack_all=False,
        steps=int(model.get("global_steps") or 0) - int(model.get("skipped_steps") or 0),
    )


def _open_layers(folder: Path, files: StageFiles) -> dict[int, list[Mapping[str, Tensor]]]:
    """Layer number -> state dict of each tensor-parallel rank."""
    layers: dict[int, list[Mapping[str, Tensor]]] = {}
    for file in files.layers:
        state = load_archive(folder / file.name)
        layers.setdefault(file.layer, []).append({k: v for k, v in state.items() if isinstance(v, Tensor)})
    return layers


def _tensor_parallel_degree(first: Mapping[str, Any], layers: Mapping[int, Sequence[Any]], ranks: int) -> int:
    """Tensor-parallel ranks: as stated, else the slices of a pipeline's layers, else all model-parallel ranks."""
    stated = (first.get("checkpoint_parallel_dimensions") or {}).get("tp_degree")
    if isinstance(stated, int) and stated > 0:
        return stated
    return max(map(len, layers.values())) if layers else ranks


def _join(slices: Sequence[Slice], rules: TensorParallelRules) -> Slice:
    """One slice from those of the tensor-parallel ranks of a stage."""
    first = slices[0]
    if len(slices) == 1:
        return first
    check_same_names("weight", [s.weights for s in slices])
    check_same_names("optimizer state", [s.masters for s in slices])
    first.weights = {name: rules.join(name, [s.weights[name] for s in slices]) for name in first.weights}
    first.masters = {name: rules.join(name, [s.masters[name] for s in slices]) for name in first.masters}
    first.optimizer = {
        name: {key: rules.join(name, [s.optimizer[name][key] for s in slices]) for key in states}
        for name, states in first.optimizer.items()
    }
    return first


def _merge(whole: Slice, stage: Slice) -> None:
    """Add a pipeline stage's part; what several stages have (tied layers) is equal and taken once."""
    whole.add(stage)
    whole.frozen += [name for name in stage.frozen if name not in whole.frozen]
    whole.has_frozen = whole.has_frozen and stage.has_frozen
    whole.refusal = whole.refusal or stage.refusal
    whole.has_optimizer = whole.has_optimizer or stage.has_optimizer
    for number, names in enumerate(stage.members):
        if number == len(whole.members):
            whole.members.append([])
            whole.groups.append(stage.groups[number])
        whole.members[number] += [name for name in names if name not in whole.members[number]]


def _fill(tensors: TensorTable, whole: Slice) -> None:
    """Give the tensors their global names: fp32 copies are masters, unless the model itself is in fp32."""
    for name, weight in whole.weights.items():
        tensors.add(module_tensor(name), weight)
    for name, master in whole.masters.items():
        is_model = _dtype_in_model(whole, name, master) == master.dtype
        tensors.add(module_tensor(name) if is_model else master_tensor(name), master)
    for name, states in whole.optimizer.items():
        for key, value in states.items():
            tensors.add(optimizer_tensor(name, key), value)


def _dtype_in_model(whole: Slice, name: str, master: Stored) -> torch.dtype | None:
    if name in whole.weights and whole.weights[name].shape == master.shape:
        return whole.weights[name].dtype
    return whole.dtypes.get(name)


def _state_of(
    whole: Slice, models: Sequence[Mapping[str, Any]], first: ModelRank, loss_scaler: Mapping[str, Any]
) -> EngineState:
    optimizer: OptimizerState | None = None
    if whole.has_optimizer:
        optimizer = {"name": None, "groups": whole.groups, "members": whole.members, "scalars": whole.scalars}
    state = engine_state_of(
        models,
        frozen_parameters=whole.frozen,
        has_frozen_parameters=whole.has_frozen,
        optimizer=optimizer,
        loss_scaler=loss_scaler,
    )
    state["shared_parameters"] = whole.aliases
    if first.is_sharded:
        state["zero_stage"] = 3
    elif first.shards:
        state["zero_stage"] = int(first.shards[0].get("zero_stage") or 1)
    return state
