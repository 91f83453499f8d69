"""Masters and optimizer state in files: a sub-group is in memory while it is stepped, and on its way before and after.

    masters of group 0  [ .. run 0 .. | .. run 1 .. | ..]     one file per flat group (`zero.masters.FileMasters`)
    masters of group 1  [ .. run 2 .. | ..]
    states              [ run 0 | run 1 | run 2 | ..]         each of them: the state tensors of its slices

    a buffer            | masters of the run's slices |pad| state tensors of its slices |     `offload.run_buffers`

Between walks a slice's `master` and `param` are zeros without memory of their own, and its state tensors are meta tensors:
shapes and dtypes can be asked, and whoever reads values the wrong way gets an error instead of zeros; moved to a device
they stay where they are, for clients that move all of `optimizer.state` when they are done. Which state tensors an
optimizer keeps is known before its first step (`optim.state_tensors`), so that their space is reserved at the start; the
optimizer makes them at that step, as ever, and they are copied into the run's buffer afterwards.

[Note: torn] A walk that fails leaves some sub-groups stepped and others not. From then on every look at state is refused
until a checkpoint has been loaded.

Does not live here: the walk (`zero.master`, the caller), how much is in memory (`offload.sub_groups`). Made by
`engine.tiers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.common.deferred import DeferredTensor
from deepspeed.errors import FileIoError, UsageError
from deepspeed.offload.agreement import together
from deepspeed.offload.run_buffers import Move, RunBuffers
from deepspeed.offload.sub_groups import PAGE_NBYTES, SubGroups, aligned
from deepspeed.offload.swap_folder import SwapFolder
from deepspeed.offload.tier_file import TierFile, bytes_of, read_new
from deepspeed.ops.aio.engine import IoEngine, IoFile
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.delivery import Delivery
from deepspeed.zero.flat import FlatGroup
from deepspeed.zero.masters import FileMasters
from deepspeed.zero.walk import Batch, Slice

__all__ = ["DiskResidence", "DiskSettings", "StateDtypes"]

_LINE_NBYTES = 64

StateDtypes = Mapping[tuple[int, torch.dtype], Mapping[str, torch.dtype]]
"""(optimizer group, dtype that it steps in) -> state key -> dtype of the state tensor."""


@dataclass(frozen=True)
class DiskSettings:
    """How a disk is used."""

    sub_groups: SubGroups
    is_read_ahead: bool
    is_write_behind: bool
    is_pinned: bool


@dataclass(frozen=True)
class _Place:
    """Where the tensors of one slice lie in the buffer of its run, in bytes."""

    master: int
    states: Mapping[str, tuple[int, torch.dtype]]


class _Run:
    """One batch, and where it lies."""

    def __init__(self, batch: Batch, state_dtypes: StateDtypes, states_start: int) -> None:
        self.batch = batch
        self.master_moves: list[Move] = []
        self.places: list[_Place] = []
        self.has_states = False
        used = 0
        masters = []
        for joined in _neighbours(batch.slices):
            flat, first = joined[0].flat, joined[0].start
            file_start = first * flat.kind.master_dtype.itemsize
            used = aligned(used) + file_start % PAGE_NBYTES
            masters += [used + (s.start - first) * s.master.itemsize for s in joined]
            nbytes = sum(s.numel for s in joined) * flat.kind.master_dtype.itemsize
            assert isinstance(flat.masters, FileMasters)  # engine.tiers made them together
            self.master_moves.append(Move(flat.masters.file.file, file_start, used, nbytes))
            used += nbytes
        self._begin = used = aligned(used)
        for s, master in zip(batch.slices, masters, strict=True):
            states = {}
            for key, dtype in state_dtypes[s.flat.kind.group_index, s.param.dtype].items():
                states[key] = (used, dtype)
                used = aligned(used + s.numel * dtype.itemsize, _LINE_NBYTES)
            self.places.append(_Place(master, states))
        self.nbytes = aligned(used)
        self.states_nbytes = self.nbytes - self._begin
        self.states_start = states_start

    def file_start(self, buffer_start: int) -> int:
        """Place in the file of states of what lies at `buffer_start`."""
        return self.states_start + buffer_start - self._begin

    def moves(self, states: TierFile, *, with_states: bool) -> list[Move]:
        """What is moved of the run."""
        of_states = [Move(states.file, self.states_start, self._begin, self.states_nbytes)]
        return [*self.master_moves, *(of_states if with_states and self.states_nbytes else ())]


class DiskResidence:
    """The protocol `zero.residence.Residence` over files.

    Args:
        io: moves bytes.
        folder: of this rank; removed by `close`.
        axis: the ranks that walk together.
        device: where collectives have their tensors.
        settings: how much is in memory at once, and what overlaps.
        state_dtypes: for every pair that occurs.
    """

    def __init__(
        self,
        io: IoEngine,
        folder: SwapFolder,
        axis: AxisGroup,
        device: torch.device,
        settings: DiskSettings,
        state_dtypes: StateDtypes,
    ) -> None:
        self._io = io
        self._folder = folder
        self._axis = axis
        self._device = device
        self._settings = settings
        self._state_dtypes = state_dtypes
        self._runs: list[_Run] = []
        self._run_of: dict[int, tuple[_Run, int]] = {}  # id of a slice's parameter -> its run, and which slice it is there
        self._at_rest: dict[int, tuple[Tensor, Tensor]] = {}
        self._files: list[TierFile] = []
        self._is_torn = False
        self._walks = 0

    is_in_memory = False

    @property
    def most_numel(self) -> int:
        """See `Residence`."""
        return self._settings.sub_groups.numel

    @property
    def buffer_nbytes(self) -> int:
        """Memory in use for runs."""
        return self._buffers.nbytes

    def attach(self, batches: Sequence[Batch], optimizer: Optimizer) -> None:
        """See `Residence`. Reserves the space of all state.

        Raises:
            FileIoError: there is none; on all ranks.
        """
        self._optimizer = optimizer
        used = 0
        for batch in batches:
            run = _Run(batch, self._state_dtypes, used)
            used += run.states_nbytes
            self._runs.append(run)
            self._run_of.update((id(s.param), (run, number)) for number, s in enumerate(batch.slices))
            self._at_rest.update((id(s.param), (s.master.data, s.param.data)) for s in batch.slices)
        self._delivery = Delivery(batches, is_pinned=self._settings.is_pinned)
        self._buffers = RunBuffers(
            self._io,
            len(self._runs),
            self._settings.sub_groups.buffers,
            max(run.nbytes for run in self._runs),
            reads=lambda number: self._runs[number].moves(self._states, with_states=self._runs[number].has_states),
            writes=lambda number: self._runs[number].moves(self._states, with_states=True),
            is_read_ahead=self._settings.is_read_ahead,
            is_write_behind=self._settings.is_write_behind,
            is_pinned=self._settings.is_pinned,
        )
        with together(self._axis, self._device):
            self._states = TierFile(self._io, self._folder.path / "states", used)
        flats: dict[int, FlatGroup] = {id(s.flat): s.flat for batch in batches for s in batch.slices}
        self._files = [self._states, *(f.masters.file for f in flats.values() if isinstance(f.masters, FileMasters))]
        for file in self._files:
            file.before_access = partial(self._settle, file.file)
            file.after_write = partial(self._forget, file.file)

    # -- the walk -----------------------------------------------------------------------------------------------------

    def walk(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """See `Residence`."""
        self._require_whole()
        for file in self._files:
            file.flush()
        self._walks += 1
        self._is_torn = True  # [Note: torn]
        for number, memory in self._buffers.walk():
            run = self._runs[number]
            for s, place in zip(run.batch.slices, run.places, strict=True):
                self._bring(s, place, memory)
            self._delivery.lend(run.batch)
            yield run.batch
            self._delivery.send(run.batch)
            for s, place in zip(run.batch.slices, run.places, strict=True):
                self._put_back(s, place, memory)
            run.has_states = True
        self._is_torn = False

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """See `Residence`. Where one rank's walk fails, state is torn on all ([Note: torn]), and all are told at once."""
        self._require_whole()
        walks_before = self._walks
        try:
            with together(self._axis, self._device):
                yield
        except FileIoError:
            self._is_torn = self._is_torn or self._walks != walks_before
            raise

    def _bring(self, s: Slice, place: _Place, memory: Tensor) -> None:
        """Let the slice have its memory in a buffer."""
        s.master.data = _tensor_at(memory, place.master, s.numel, s.master.dtype)
        if not s.is_wide:
            s.param.data = s.master.data.view(s.param.shape)
        state = self._optimizer.state.get(s.param, {})
        for key, (start, dtype) in place.states.items():
            if key in state:
                state[key] = _tensor_at(memory, start, s.numel, dtype).view(s.param.shape)

    def _put_back(self, s: Slice, place: _Place, memory: Tensor) -> None:
        """Take the slice's memory away; state that was made in the step is copied into the buffer first."""
        state = self._optimizer.state.get(s.param, {})
        for key, (start, dtype) in place.states.items():
            if key in state:
                target = _tensor_at(memory, start, s.numel, dtype)
                if state[key].data_ptr() != target.data_ptr():
                    target.copy_(state[key].view(-1))
                state[key] = _stand_in(s, dtype)
        _refuse_unknown(s, state, place)
        s.master.data, s.param.data = self._at_rest[id(s.param)]

    # -- between walks ------------------------------------------------------------------------------------------------

    def read_state(self, s: Slice, key: str, start: int, stop: int) -> DeferredTensor:
        """See `Residence`."""
        self._require_whole()
        begin, dtype = self._state_at(s, key)
        return DeferredTensor(
            stop - start,
            dtype,
            lambda: read_new(self._states, begin + start * dtype.itemsize, stop - start, dtype),
        )

    @contextmanager
    def editing_state(self, s: Slice, key: str, start: int, stop: int) -> Iterator[Tensor]:
        """See `Residence`."""
        values = self.read_state(s, key, start, stop).read()
        yield values
        begin, dtype = self._state_at(s, key)
        self._states.write(begin + start * dtype.itemsize, bytes_of(values))

    def put_away(self, s: Slice, state: dict[str, Any]) -> dict[str, Tensor]:
        """See `Residence`."""
        run, number = self._run_of[id(s.param)]
        place = run.places[number]
        stand_ins = {}
        for key, (start, dtype) in place.states.items():
            value = state.get(key)
            if value is not None and value.device.type != "meta":
                own = value.detach().to(device="cpu", dtype=dtype).contiguous()
                self._states.write(run.file_start(start), bytes_of(own))
                stand_ins[key] = _stand_in(s, dtype)
                del state[key]
        _refuse_unknown(s, state, place)
        run.has_states = run.has_states or bool(stand_ins)
        return stand_ins

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """See `Residence`."""
        self._is_torn = True
        with together(self._axis, self._device):
            self._states.restore()
            yield
        self._is_torn = False

    def close(self) -> None:
        """See `Residence`."""
        with ExitStack() as stack:  # each of them, whatever another one meets
            stack.callback(self._folder.close)
            stack.callback(self._io.close)
            for file in self._files:
                stack.callback(file.close)

    def _settle(self, file: IoFile, start: int, stop: int) -> None:
        self._buffers.settle(self._lying_in(file, start, stop))

    def _forget(self, file: IoFile, start: int, stop: int) -> None:
        self._buffers.forget(self._lying_in(file, start, stop))

    def _lying_in(self, file: IoFile, start: int, stop: int) -> Callable[[int], bool]:
        """Which runs have some of these bytes of a file."""

        def lies_there(number: int) -> bool:
            moves = self._runs[number].moves(self._states, with_states=True)
            return any(move.overlaps(file, start, stop) for move in moves)

        return lies_there

    def _state_at(self, s: Slice, key: str) -> tuple[int, torch.dtype]:
        run, number = self._run_of[id(s.param)]
        start, dtype = run.places[number].states[key]
        return run.file_start(start), dtype

    def _require_whole(self) -> None:
        if self._is_torn:
            raise UsageError(
                f"optimizer state in {self._folder.path} is of no use any more: an update of it failed half way. Load a "
                "checkpoint, or start anew."
            )


def _neighbours(slices: Sequence[Slice]) -> Iterator[list[Slice]]:
    """The slices in lists of those that follow one another in one flat group."""
    joined: list[Slice] = []
    for s in slices:
        if joined and not (joined[-1].flat is s.flat and joined[-1].stop == s.start):
            yield joined
            joined = []
        joined.append(s)
    if joined:
        yield joined


def _tensor_at(memory: Tensor, start: int, numel: int, dtype: torch.dtype) -> Tensor:
    return memory[start : start + numel * dtype.itemsize].view(dtype)


class _StandIn(Tensor):
    """A meta tensor for what rests in a file: another device is no place for it, and asking for one changes nothing."""

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        is_of_another_type = any(isinstance(value, (torch.dtype, Tensor)) for value in (*args, *kwargs.values()))
        return super().to(*args, **kwargs) if is_of_another_type else self

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        return self


def _stand_in(s: Slice, dtype: torch.dtype) -> Tensor:
    return torch.empty(s.param.shape, dtype=dtype, device="meta").as_subclass(_StandIn)


def _refuse_unknown(s: Slice, state: Mapping[str, Any], place: _Place) -> None:
    """A state tensor of the slice's size for which no space was reserved."""
    unknown = [
        key
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == s.param.shape and key not in place.states and key != "step"
    ]
    if unknown:
        raise UsageError(
            f"the optimizer made state {unknown} at its first steps that it did not show when it was tried on a small "
            'parameter, so that no space was reserved for it. Use offload_optimizer.device "cpu" with this optimizer.'
        )
