"""The original's universal folder, as a `CheckpointSource`.

    tag_universal/
      mp_rank_MM_model_states.pt (stage 3: zero_pp_rank_D_mp_rank_MM_...)  counters, schedule, client state, shapes, ties
      zero/optimizer_state.pt                                              hyperparameters, loss scale, at stage 3 the step
      zero/<parameter>/fp32.pt                                             --> master/<parameter>
      zero/<parameter>/exp_avg.pt, exp_avg_sq.pt, ...                      --> optimizer/<parameter>/<key>
      zero/<parameter>/step.pt, other numbers                              --> scalars
      zero/<frozen or buffer>/fp32.pt, or the model-state files            --> module/<name>

A value is `{"param": tensor in its shape, ...}`, or, from ZeRO stage 3, a bare flat tensor whose shape the model-state files
tell; one without dimensions is a number. A file is opened when its tensor is asked for: a folder of thousands of files costs
what is read.

[Note: the owner counts] A tied weight may have a second folder under its later name; in 16-bit training that one holds the
rounded value and the owner's the fp32 master. So later names are never read.

Does not live here: unpickling (`original.archive`), the grammar of file names (`original.files`), writing
(`original.writing.to_universal`). Called by `opening`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.agreement import Ranks
from deepspeed.checkpoint.disk.names import master_tensor, module_tensor, optimizer_tensor
from deepspeed.checkpoint.disk.range_check import prepare_out, unknown_tensor
from deepspeed.checkpoint.original.archive import load_archive
from deepspeed.checkpoint.original.engine_state import (
    client_state_of,
    engine_state_of,
    group_members,
    loss_scaler_of,
    plain_groups,
    plain_module,
    shared_parameters_of,
)
from deepspeed.checkpoint.original.files import ModelFile, StageFiles
from deepspeed.checkpoint.original.reading.assembled import Pieces, Stored
from deepspeed.checkpoint.original.reading.completeness import CURE, check_optimizer_state
from deepspeed.checkpoint.original.reading.model_ranks import check_ranks
from deepspeed.checkpoint.original.reading.share_check import check_share
from deepspeed.checkpoint.source import EngineState, OptimizerState
from deepspeed.common.wording import some
from deepspeed.errors import CheckpointDamagedError

__all__ = ["MASTER_FILE", "MEMBERS_KEY", "OPTIMIZER_STATE_FILE", "STEP_FILE", "UNIVERSAL_FOLDER", "UniversalSource"]

UNIVERSAL_FOLDER = "zero"
OPTIMIZER_STATE_FILE = "optimizer_state.pt"
MASTER_FILE = "fp32.pt"
STEP_FILE = "step.pt"
MEMBERS_KEY = "parameter_names"
"""Names of each group's parameters: ours, in `optimizer_state.pt`; the original's own folders do not always tell them."""

_KEPT_OPEN = 256
"""Mapped tensors kept for the next range of the same tensor."""


class UniversalSource:
    """A universal folder of the original, open for reading; see `CheckpointSource`.

    Raises:
        CheckpointDamagedError: a trained parameter has no value or not the state that the others have, a rank's model states
            or `optimizer_state.pt` are lost, or a file cannot be read.
    """

    def __init__(self, folder: Path, tag: str, ranks: Ranks) -> None:
        self.folder = folder
        self.tag = tag
        self._ranks = ranks
        model_files = StageFiles.of(path.name for path in folder.iterdir()).models
        self._model_files = _of_one_kind(model_files)
        first_of_rank = {file.model_rank: file for file in reversed(self._model_files)}
        self._model_states = [load_archive(folder / first_of_rank[rank].name) for rank in sorted(first_of_rank)]
        self._check_model_files(model_files)
        self._shapes = {n: tuple(shape) for states in self._model_states for n, shape in _trained_shapes(states)}
        self._open = lru_cache(maxsize=_KEPT_OPEN)(self._open_anew)
        zero = folder / UNIVERSAL_FOLDER
        self._folders = {path.name: {file.name for file in path.glob("*.pt")} for path in zero.iterdir() if path.is_dir()}
        self._number_files = self._find_number_files()
        self._places = self._find_places()
        self._check_state_files()

    @cached_property
    def state(self) -> EngineState:
        """What the engine stored besides tensors."""
        buffers = {name for states in self._model_states for name in states.get("buffer_names") or ()}
        order = {name: number for states in self._model_states for number, name in enumerate(states.get("module") or ())}
        static = [name.removeprefix(module_tensor("")) for name in self.names(module_tensor(""))]
        frozen = sorted((name for name in static if name not in buffers), key=lambda name: order.get(name, len(order)))
        known = dict.fromkeys(name for states in self._model_states for name in states.get("frozen_param_shapes") or ())
        return engine_state_of(
            self._model_states,
            frozen_parameters=[*known, *(name for name in frozen if name not in known)],
            has_frozen_parameters=all(name in frozen for name in known),
            optimizer=self._optimizer_state() if self._stored else None,
            loss_scaler=loss_scaler_of(self._stored),
        )

    def with_members(self, members: Sequence[Sequence[str]]) -> UniversalSource:
        """Itself: entries are stored by name."""
        return self

    def client_state(self) -> dict[str, Any]:
        """What the user stored, anew at each call; tensors are on the CPU."""
        return client_state_of(self._model_states[0])

    def rank_state(self, rank: int) -> dict[str, Any]:
        """Nothing: this layout stores no state per rank."""
        return {}

    def names(self, prefix: str = "") -> list[str]:
        """Names of all tensors that start with `prefix`, sorted."""
        return sorted(name for name in self._places if name.startswith(prefix))

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of a tensor."""
        return self._open(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a tensor on the disk."""
        return self._open(name).dtype

    def read(self, name: str, start: int = 0, length: int | None = None, out: Tensor | None = None) -> Tensor:
        """Read a range of the flattened tensor; see `CheckpointSource.read`."""
        tensor = self._open(name)
        out = prepare_out(name, tensor.numel, tensor.dtype, start, length, out)
        if out.numel():
            tensor.values.read(start, out)
        return out

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
        zero = self.folder / UNIVERSAL_FOLDER
        files = [self.folder / file.name for file in StageFiles.of(path.name for path in self.folder.iterdir()).models]
        check_share(self.folder, [*files, *sorted(zero.glob("*.pt")), *sorted(zero.glob("*/*.pt"))], self._ranks)

    # -- what is lost -------------------------------------------------------------------------------------------------

    def _check_model_files(self, files: Sequence[ModelFile]) -> None:
        if not files:
            raise CheckpointDamagedError(
                f"{self.folder} has no *_model_states.pt of a rank, which holds the engine's state."
            )
        first = self._model_states[0]
        for rank in check_ranks(self.folder, "mp_rank", {file.model_rank for file in files}, first.get("mp_world_size")):
            sharded = {f.data_rank for f in files if f.model_rank == rank and f.data_rank is not None}
            if sharded:
                check_ranks(self.folder, f"model states of mp_rank {rank}", sharded, first.get("dp_world_size"))

    def _check_state_files(self) -> None:
        """Compare the files of each parameter with those of the others in its group."""
        keys = {n: {f.removesuffix(".pt") for f in self._folders[n] - {MASTER_FILE}} for n in self._trained()}
        if not self._stored:
            if any(keys.values()):
                raise CheckpointDamagedError(
                    f"{self.folder} lacks {UNIVERSAL_FOLDER}/{OPTIMIZER_STATE_FILE}, and has the optimizer's tensors. {CURE}"
                )
            return
        step = STEP_FILE.removesuffix(".pt")
        is_common = _common_step(self._stored.get("optimizer_state_dict") or {}, self._param_groups) is not None
        if is_common and not any(step in found for found in keys.values()):
            keys = {name: found | {step} if found else found for name, found in keys.items()}
        first = self._model_states[0]
        try:
            check_optimizer_state(
                self._param_groups,
                self._members(),
                keys,
                dims={name: len(shape) for name, shape in self._shapes.items()},
                may_lack_all=MEMBERS_KEY in self._stored,  # ours: the original's flat buffers have state for every parameter
                steps=int(first.get("global_steps") or 0) - int(first.get("skipped_steps") or 0),
            )
        except CheckpointDamagedError as error:
            raise CheckpointDamagedError(
                f"{self.folder}: {error} For the weights alone, remove {UNIVERSAL_FOLDER}/{OPTIMIZER_STATE_FILE} and every "
                f"file of the optimizer's state beside {MASTER_FILE}."
            ) from error

    # -- where each tensor lies ---------------------------------------------------------------------------------------

    def _find_number_files(self) -> set[str]:
        """Names of the files that hold one number for each parameter; the first of each name tells."""
        firsts = {file: name for name, files in reversed(self._folders.items()) for file in files - {MASTER_FILE, STEP_FILE}}
        values = {file: load_archive(self.folder / UNIVERSAL_FOLDER / name / file) for file, name in firsts.items()}
        return {STEP_FILE} | {file for file, value in values.items() if isinstance(value, Tensor) and not value.dim()}

    def _find_places(self) -> dict[str, Callable[[], Stored]]:
        """Name of each tensor -> how to open it."""
        shared = shared_parameters_of(self._model_states)  # [Note: the owner counts]
        places: dict[str, Callable[[], Stored]] = {}
        for name, files in self._folders.items():
            if name in shared or MASTER_FILE not in files:
                continue
            if name not in self._shapes and files == {MASTER_FILE}:
                places[module_tensor(name)] = partial(self._open_file, name, MASTER_FILE)
                continue
            places[master_tensor(name)] = partial(self._open_file, name, MASTER_FILE)
            for file in files - {MASTER_FILE, *self._number_files}:
                places[optimizer_tensor(name, file.removesuffix(".pt"))] = partial(self._open_file, name, file)
        lacking = [name for name in self._shapes if name not in shared and master_tensor(name) not in places]
        if lacking:
            raise CheckpointDamagedError(
                f"{self.folder} lacks {UNIVERSAL_FOLDER}/<name>/{MASTER_FILE} of {some(list(map(repr, lacking)), 5)}: the "
                "conversion did not end, or files were lost when it was copied. Convert or copy it again."
            )
        for name, place in self._static_places(shared):
            if master_tensor(name) not in places:
                places[module_tensor(name)] = place
        return places

    def _static_places(self, shared: Mapping[str, str]) -> Iterator[tuple[str, Callable[[], Stored]]]:
        """Frozen parameters and buffers of the model-state files, in the model's dtype.

        Not where several model-parallel ranks hold parts of them: those were put together in their folders.
        """
        if len(self._model_states) > 1:
            return
        states = self._model_states[0]
        for name, shape in (states.get("frozen_param_shapes") or {}).items():
            if name in (states.get("frozen_param_fragments") or {}):
                yield name, partial(self._open_fragments, name, tuple(shape))
        for name, value in plain_module(states).items():
            is_known = name in self._shapes or name in shared or name in (states.get("frozen_param_shapes") or {})
            if not is_known:
                yield name, partial(_stored, value.detach(), tuple(value.shape))

    def _open_anew(self, name: str) -> Stored:
        if name not in self._places:
            raise unknown_tensor(self.folder, name, self._places)
        return self._places[name]()

    def _open_file(self, parameter: str, file: str) -> Stored:
        path = self.folder / UNIVERSAL_FOLDER / parameter / file
        value = load_archive(path)
        if isinstance(value, Mapping):
            value = value.get("param")
            shape = tuple(value.shape) if isinstance(value, Tensor) else ()
        else:
            shape = self._shapes.get(parameter, tuple(value.shape) if isinstance(value, Tensor) else ())
        if not isinstance(value, Tensor) or value.numel() != torch.Size(shape).numel():
            found = f"a tensor of {value.numel()} elements" if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointDamagedError(f"{path} holds {found} where a tensor of shape {shape} belongs. Convert it again.")
        return _stored(value, shape)

    def _open_fragments(self, parameter: str, shape: tuple[int, ...]) -> Stored:
        """A frozen parameter: whole in the only file, or one padded shard in the file of each data-parallel rank."""
        files = [self._fragment_in(file, parameter) for file in self._model_files]
        if sum(fragment.numel() for fragment in files) < torch.Size(shape).numel():
            raise CheckpointDamagedError(
                f"{self.folder} holds shards of {len(files)} ranks, too few for the frozen parameter {parameter!r} "
                f"of shape {shape}: a *_model_states.pt file is missing. Copy it again."
            )
        return Stored(shape, files[0].dtype, Pieces([fragment.reshape(-1) for fragment in files]))

    def _fragment_in(self, file: ModelFile, parameter: str) -> Tensor:
        fragment: Tensor = load_archive(self.folder / file.name)["frozen_param_fragments"][parameter]
        return fragment

    # -- the optimizer ------------------------------------------------------------------------------------------------

    @cached_property
    def _stored(self) -> Mapping[str, Any]:
        """Content of `optimizer_state.pt`; empty: a folder of weights alone."""
        path = self.folder / UNIVERSAL_FOLDER / OPTIMIZER_STATE_FILE
        stored: Mapping[str, Any] = load_archive(path) if path.is_file() else {}
        return stored

    @property
    def _param_groups(self) -> Sequence[Mapping[str, Any]]:
        inner = self._stored.get("optimizer_state_dict") or {}
        return self._stored.get("param_groups") or inner.get("param_groups") or []

    def _optimizer_state(self) -> OptimizerState:
        return {
            "name": None,
            "groups": plain_groups(self._param_groups),
            "members": self._members(),
            "scalars": {name: numbers for name in self._trained() if (numbers := self._numbers(name))},
        }

    def _members(self) -> list[list[str]]:
        shapes = [states.get("param_shapes") or [] for states in self._model_states]
        return self._stored.get(MEMBERS_KEY) or group_members(shapes, len(self._param_groups))

    def _trained(self) -> list[str]:
        return [name.removeprefix(master_tensor("")) for name in self.names(master_tensor(""))]

    def _numbers(self, parameter: str) -> dict[str, float]:
        common = _common_step(self._stored.get("optimizer_state_dict") or {}, self._param_groups)
        numbers = {} if common is None else {STEP_FILE.removesuffix(".pt"): common}
        for file in sorted(self._number_files & self._folders[parameter]):
            value = load_archive(self.folder / UNIVERSAL_FOLDER / parameter / file, mmap=False)
            numbers[file.removesuffix(".pt")] = float(value["param"] if isinstance(value, Mapping) else value)
        return numbers


def _of_one_kind(files: list[ModelFile]) -> list[ModelFile]:
    """The files with whole weights where there are any: a folder may also have those that ZeRO stage 3 looks for."""
    return [file for file in files if file.data_rank is None] or files


def _stored(value: Tensor, shape: tuple[int, ...]) -> Stored:
    return Stored(shape, value.dtype, Pieces([value.reshape(-1)]))


def _trained_shapes(states: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for entry in states.get("param_shapes") or ():
        yield from entry.items()


def _common_step(inner: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]]) -> float | None:
    """The step that all parameters share, where it is not stored for each: in the state of the first that has one."""
    for state in [*(inner.get("state") or {}).values(), *param_groups]:
        if "step" in state:
            return float(state["step"])
    return None
