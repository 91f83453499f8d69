"""Bringing together what rests outside memory: every rank fills a slot of its own, then all read each other's.

    gather n       slot n % slots   <-- fill --    a file, a device's memory, ...      asynchronous, of this rank alone
    wait n         filled? -> offer n to the others -> all offered n? -> every rank's slot n --> into, in rank order
    gather n + S   needs slot n again: n is completed first, and nobody reads it any more

Lives here: the order of slots, and the three ways to read each other's. Does not live here: where bytes rest and how a slot
is filled (`offload`), the choice (`comm.algorithms`, which callers use). The protocols of memory that is gathered where it
rests are in `comm.flat`.

[Note: failures travel] A slot that could not be filled is offered all the same, with the error's text behind it, so that all
ranks raise the error in the same `wait`. Through the back end the text does not travel: there the rank that met the error
raises it, and the others notice when its connections close.

All ranks gather the same things in the same order. They may wait for them in any order, but the back end needs that to be
the same on all ranks as well: a collective starts in `wait`, because only then the bytes are there.
"""

from __future__ import annotations

import errno
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from deepspeed.comm.backend import complete_in_place
from deepspeed.comm.board import Board, Peers, Progress
from deepspeed.comm.flat import Record, Work, record_nothing
from deepspeed.comm.patience import Patience
from deepspeed.comm.shared_memory import SharedMemory
from deepspeed.errors import ArgumentError, FileIoError

__all__ = ["BackendSlots", "Fill", "Filling", "LocalSlots", "SharedSlots", "Slots", "Stage", "shared_nbytes"]


_HEAD = struct.Struct("qq")
"""errno (0: filled) and length of the text behind a slot."""
_TEXT_NBYTES = 4096


class Filling(Protocol):
    """The filling of one slot, under way."""

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> None:
        """Block until the slot is filled; raise where that failed."""


Fill = Callable[[torch.Tensor], Filling]
"""Starts to fill a slot (1-D bytes) from its beginning; what comes after the bytes that were asked for does not matter."""


class Slots(Protocol):
    """The memory of a stage, and the way to the other ranks' slots. Gathers have numbers from 1; slot of n: `n % count`."""

    own: list[torch.Tensor]
    """This rank's slots: 1-D bytes on the host."""

    tells_failures: bool
    """Whether `collect` raises what `offer` was given; else the stage does. [Note: failures travel]"""

    def begin(self, number: int, key: tuple[int, int]) -> None:
        """Block until nobody reads what was in the slot of gather `number`; `key` must be the same on all ranks."""

    def offer(self, number: int, failure: FileIoError | None) -> None:
        """This rank's slots of all gathers up to `number` are filled, or could not be. Waits for nobody."""

    def collect(self, number: int, nbytes: int, into: torch.Tensor) -> None:
        """Bring the first `nbytes` of every rank's slot into `into` (bytes, ranks x nbytes). Blocks; `offer` came before.

        Raises:
            FileIoError: on all ranks, that of the first rank whose slot could not be filled. [Note: failures travel]
        """

    def finish(self, number: int) -> None:
        """This rank has collected everything up to `number`. Waits for nobody."""

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on: tell the others."""

    def close(self) -> None:
        """Let go of the others' slots. Not collective."""


class Stage:
    """Gathers through slots; see the module's picture.

    Args:
        slots: at least one.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._count = len(slots.own)
        self._number = 0
        self._filled: deque[_StagedGather] = deque()  # to be offered, in order
        self._open: dict[int, _StagedGather] = {}  # not collected
        self.is_broken = False
        """Whether a gather has failed: this rank may have lost step with the others, so nothing can follow."""

    @property
    def free_count(self) -> int:
        """Gathers that can start now without completing an earlier one; the same on all ranks at the same gather."""
        return self._count - len(self._open)

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot."""
        return self._slots.own[0].numel()

    def gather(self, nbytes: int, fill: Fill, into: torch.Tensor, key: tuple[int, int]) -> Work:
        """Start to bring `nbytes` of every rank together. Collective, in the sense of the module's docstring.

        Args:
            nbytes: of each rank; at most `slot_nbytes`.
            fill: starts to fill this rank's slot.
            into: contiguous, of any dtype and device: ranks x nbytes bytes, undefined until `wait()` returns.
            key: names what is gathered; the same on all ranks.

        Raises:
            ArgumentError: sizes that do not fit.
            CommError: other ranks are gone, late, or gather other things. `wait` raises it too.
        """
        if nbytes > self.slot_nbytes:
            raise ArgumentError(
                f"{nbytes} bytes per rank are to be gathered through slots of {self.slot_nbytes}; needed at most that. Make "
                "the slots larger, or gather in parts."
            )
        number = self._number + 1
        before = self._open.get(number - self._count)
        if before is not None:
            before.wait()
        self._guarded(lambda: self._slots.begin(number, key))
        self._number = number
        work = _StagedGather(self, number, nbytes, into.view(torch.uint8))
        self._open[number] = work
        work.filling = fill(self._slots.own[number % self._count])
        self._filled.append(work)
        return work

    def settle(self) -> None:
        """Complete every gather that was started."""
        for work in list(self._open.values()):
            work.wait()

    def progress(self) -> None:
        """Offer what is filled; wait for nobody. See `comm.board.Progress`."""
        while self._filled and self._filled[0].filling.is_done:
            self._offer_next()

    def close(self) -> None:
        """Let go of the others' memory, and forget what is under way. Not collective; a second call does nothing."""
        for work in self._filled:
            work.abandon()
        self._filled.clear()
        self._open.clear()
        self._slots.close()

    def _offer_next(self) -> None:
        work = self._filled[0]
        self._guarded(work.fill)
        self._filled.popleft()
        self._slots.offer(work.number, work.failure)

    def _complete(self, work: _StagedGather) -> None:
        while self._filled and self._filled[0].number <= work.number:
            self._offer_next()
        if work.failure is not None and not self._slots.tells_failures:
            self.is_broken = True
            raise work.failure
        self._guarded(lambda: self._slots.collect(work.number, work.nbytes, work.into))
        del self._open[work.number]
        self._slots.finish(min(self._open, default=self._number + 1) - 1)

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except BaseException as error:  # an interrupt too: this rank has lost step with the others
            self.is_broken = True
            self._slots.fail(error)
            raise


class _Nothing:
    """A filling that is over."""

    is_done = True

    def wait(self) -> None:
        """Return."""


class _StagedGather:
    """One gather on its way."""

    def __init__(self, stage: Stage, number: int, nbytes: int, into: torch.Tensor) -> None:
        self.number = number
        self.nbytes = nbytes
        self.into = into
        self.filling: Filling = _Nothing()
        self.failure: FileIoError | None = None
        self._stage: Stage | None = stage

    def wait(self) -> None:
        """Block until all of it is there; raise what the filling raises, or CommError."""
        if self._stage is not None:
            self._stage._complete(self)
            self._stage = None

    def fill(self) -> None:
        """Block until its slot is filled, or could not be."""
        try:
            self.filling.wait()
        except FileIoError as error:
            self.failure = error

    def abandon(self) -> None:
        """Forget it, once nothing fills its slot any more."""
        self._stage = None
        self.fill()


# -- one rank alone ---------------------------------------------------------------------------------------------------


class LocalSlots:
    """The slots of a single rank."""

    tells_failures = False

    def __init__(self, own: Sequence[torch.Tensor]) -> None:
        """Store the slots."""
        self.own = list(own)

    def begin(self, number: int, key: tuple[int, int]) -> None:
        """See `Slots`."""

    def offer(self, number: int, failure: FileIoError | None) -> None:
        """See `Slots`."""

    def collect(self, number: int, nbytes: int, into: torch.Tensor) -> None:
        """See `Slots`."""
        into.copy_(self.own[number % len(self.own)][:nbytes])

    def finish(self, number: int) -> None:
        """See `Slots`."""

    def fail(self, error: BaseException) -> None:
        """See `Slots`."""

    def close(self) -> None:
        """See `Slots`."""


# -- ranks of one host ------------------------------------------------------------------------------------------------


def shared_nbytes(count: int, nbytes: int) -> int:
    """Bytes of a rank's row of shared memory for `count` slots of `nbytes`."""
    return count * (nbytes + _TEXT_NBYTES)


class SharedSlots:
    """Slots in memory that all ranks of the group map, each followed by a page for the text of an error."""

    tells_failures = True

    def __init__(
        self,
        memory: SharedMemory,
        count: int,
        rank: int,
        ranks: Sequence[int],
        patience: Patience,
        record: Record = record_nothing,
        progress: Progress | None = None,
    ) -> None:
        """Cut each row (of `shared_nbytes`) into `count` slots; the other parameters as for `SharedMemoryReducer`."""
        assert 0 < count < Board.SLOTS  # the board remembers the keys of that many
        self._rank = rank
        self._ranks = ranks
        slots = [row.chunk(count) for row in memory.rows]
        self._rows = [[slot[:-_TEXT_NBYTES] for slot in row] for row in slots]
        self._texts = [[slot[-_TEXT_NBYTES:] for slot in row] for row in slots]
        self.own = self._rows[rank]
        self._peers = Peers(memory.board, memory.processes, rank, ranks, patience, "parameter stage", progress or Progress())
        self._board = memory.board
        self._record = record

    def begin(self, number: int, key: tuple[int, int]) -> None:
        """See `Slots`."""
        self._peers.check_usable()
        if number > len(self.own):
            self._wait(self._board.finished, number - len(self.own), number, "to read what the slot held before")
        self._board.launch(number, *key)

    def offer(self, number: int, failure: FileIoError | None) -> None:
        """See `Slots`."""
        slot = number % len(self.own)
        text = b"" if failure is None else str(failure).encode()[: _TEXT_NBYTES - _HEAD.size]
        head = _HEAD.pack(0 if failure is None else failure.errno or errno.EIO, len(text))
        page = torch.frombuffer(bytearray(head + text), dtype=torch.uint8)
        self._texts[self._rank][slot][: page.numel()].copy_(page)
        self._board.publish(number)

    def collect(self, number: int, nbytes: int, into: torch.Tensor) -> None:
        """See `Slots`."""
        self._peers.check_usable()
        done = self._record(into.numel(), self._peers.size)
        self._wait(self._board.published, number, number, "to read their shards of it")
        key = self._board.range(self._rank, number)
        self._peers.check_same_range(number, *key, lambda: f"gather {number} of parameters that rest outside memory")
        slot = number % len(self.own)
        self._raise_failure(slot)
        for target, row in zip(into.view(self._peers.size, nbytes).unbind(), self._rows, strict=True):
            target.copy_(row[slot][:nbytes])
        if done is not None:
            done()

    def finish(self, number: int) -> None:
        """See `Slots`."""
        self._board.finish(number)

    def fail(self, error: BaseException) -> None:
        """See `Slots`."""
        self._peers.failed(error)

    def close(self) -> None:
        """See `Slots`."""
        self._peers.close()
        self._rows = [self.own for _ in self._rows]
        self._texts = [self._texts[self._rank] for _ in self._texts]

    def _raise_failure(self, slot: int) -> None:
        for rank, texts in enumerate(self._texts):
            number, nbytes = _HEAD.unpack(bytes(texts[slot][: _HEAD.size].tolist()))
            if number:
                text = bytes(texts[slot][_HEAD.size : _HEAD.size + nbytes].tolist()).decode(errors="replace")
                raise FileIoError(number, text if rank == self._rank else f"rank {self._ranks[rank]}: {text}")

    def _wait(self, count: Callable[[int], int], reach: int, number: int, doing: str) -> None:
        self._peers.wait(count, reach, lambda: f"gather {number} of parameters that rest outside memory", doing)


# -- all others -------------------------------------------------------------------------------------------------------


class BackendSlots:
    """Slots that no other rank sees; the back end carries what is in them, on the device of what is gathered into."""

    tells_failures = False

    def __init__(
        self,
        own: Sequence[torch.Tensor],
        group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        timeout_seconds: float | None = None,
    ) -> None:
        """Store the parts; `ranks` is the global rank of each group rank."""
        self.own = list(own)
        self._group = group
        self._ranks = ranks
        self._rank = dist.get_rank(group)
        self._timeout_seconds = timeout_seconds

    def begin(self, number: int, key: tuple[int, int]) -> None:
        """See `Slots`: a finished collective has read this rank's slot."""

    def offer(self, number: int, failure: FileIoError | None) -> None:
        """See `Slots`."""

    def collect(self, number: int, nbytes: int, into: torch.Tensor) -> None:
        """See `Slots`."""
        mine = into[self._rank * nbytes : (self._rank + 1) * nbytes]
        mine.copy_(self.own[number % len(self.own)][:nbytes])
        what = f"gather {number} of parameters that rest outside memory"
        complete_in_place(into, self._group, self._ranks, self._timeout_seconds, what).wait()

    def finish(self, number: int) -> None:
        """See `Slots`."""

    def fail(self, error: BaseException) -> None:
        """See `Slots`: the others notice when this rank's connections close."""

    def close(self) -> None:
        """See `Slots`."""
