"""Reduce-scatter and all-gather of flat buffers for ranks that share a host: every rank maps every rank's buffer.

    launch n       board[rank]: range n is [start, stop) and holds my gradients; parts that all have launched are reduced
    wait n         all launched n?  ->  mean of MY part over all rows, into my shard  ->  board[rank]: n reduced
    wait_free n    all reduced n?   ->  nobody reads my range any more

    publish        board[rank]: my row holds version v
    gather         all published v? ->  copy the others' rows
    begin_update   board[rank]: I read no more of v;  all finished v?  ->  my row may be written

Lives here: both directions, for ranks that could map each other's memory. Does not live here: memory and board
(`comm.shared_memory`, `comm.board`), the arithmetic (`comm.mean`), the protocols (`comm.flat`). Only `comm.algorithms` calls
this module.

Nobody writes what is not its own: a reduce-scatter in place writes this rank's part of this rank's row, which no other rank
reads; a gather in place writes the other ranks' parts of this rank's row, which no other rank reads either. So the only
waits are those above.

[Note: progress] The arithmetic runs inside `launch` (of what all ranks have launched meanwhile), inside `wait`, and inside
whatever else this rank waits for in shared memory (`comm.board.Progress`). Only outside of these, in a collective of the
back end or in user code, a rank does nothing for others; so that must not wait for what they do only after their own wait.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from deepspeed.comm.board import Board, Peers, Progress
from deepspeed.comm.flat import Publication, Record, check_gathered, check_parts, check_target, record_nothing
from deepspeed.comm.mean import BlockMean, MeanRule, check_range, own_part
from deepspeed.comm.patience import Patience
from deepspeed.comm.shared_memory import SharedMemory
from deepspeed.errors import UsageError

__all__ = ["SharedMemoryGatherer", "SharedMemoryReduceScatterer"]


class _Launch(NamedTuple):
    """One range and where this rank's part of it goes."""

    start: int
    stop: int
    into: torch.Tensor
    accumulate: bool


class SharedMemoryReduceScatterer:
    """`FlatReduceScatterer` over memory that all ranks of the group map. See the module's picture.

    Numbers: `comm.mean.BlockMean`; each part has the bits that `SharedMemoryReducer` would give. After an error the contents
    of what is in flight are undefined and every later call raises the same error.
    """

    def __init__(
        self,
        memory: SharedMemory,
        rank: int,
        ranks: Sequence[int],
        rule: MeanRule,
        communication_dtype: torch.dtype,
        patience: Patience,
        record: Record = record_nothing,
        progress: Progress | None = None,
    ) -> None:
        """Store the parts; parameters as for `SharedMemoryReducer`."""
        progress = progress or Progress()
        self.buffer = memory.rows[rank]
        self._rows = memory.rows
        self._rank = rank
        self._peers = Peers(memory.board, memory.processes, rank, ranks, patience, "gradient reduce-scatterer", progress)
        self._board = memory.board
        self._mean = BlockMean(self.buffer.dtype, communication_dtype, rule)
        self._record = record
        self._launched = self._reduced = self._freed = 0
        self._busy: deque[tuple[int, int]] = deque()  # ranges freed + 1 ... launched
        self._pending: deque[_Launch] = deque()  # launches reduced + 1 ... launched
        progress.add(self)

    def launch(self, start: int, stop: int, into: torch.Tensor | None = None, *, accumulate: bool = False) -> _PartWork:
        """See `FlatReduceScatterer`. Waits for nobody, unless `Board.SLOTS` launches are not free: then frees the oldest."""
        self._peers.check_usable()
        check_parts(start, stop, self.buffer.numel(), self._peers.size)
        check_target(into, (stop - start) // self._peers.size, self.buffer.device, accumulate)
        for low, high in self._busy:
            if start < high and low < stop:
                raise UsageError(
                    f"launch of [{start}, {stop}) while other ranks may read [{low}, {high}) of an older launch; call "
                    "wait_free() on that one before its elements are written and reduced again."
                )
        self._free(self._launched + 1 - Board.SLOTS)
        if into is None:
            into = self.buffer[slice(*own_part(start, stop, self._rank, self._peers.size))]
        self._launched += 1
        self._busy.append((start, stop))
        self._pending.append(_Launch(start, stop, into, accumulate))
        self._board.launch(self._launched, start, stop)
        work = _PartWork(self, self._launched, self._record((stop - start) * self.buffer.itemsize, self._peers.size))
        self.progress()
        return work

    def close(self) -> None:
        """Leave the group and let go of the others' rows; not collective, and a second call does nothing.

        Ranks that still wait for this one get an error. `buffer` and its views live on as this process's own.
        """
        self._peers.close()
        self._rows = []
        self._pending.clear()

    def progress(self) -> None:
        """Reduce this rank's part of what all ranks have launched; wait for nobody."""
        if self._pending and self._peers.is_usable:
            self._guarded(self._reduce_ready)

    def _complete(self, number: int) -> None:
        """Block until this rank's part of range `number`, and of all before it, is reduced."""
        if number <= self._reduced:
            return
        self._peers.check_usable()

        def complete() -> None:
            while self._reduced < number:  # a wait may reduce, too
                self._await_launches(self._reduced + 1, *self._pending[0][:2])
                self._reduce_ready()

        self._guarded(complete)

    def _free(self, number: int) -> None:
        """Block until no rank reads range `number` or one before it any more."""
        if number <= self._freed:
            return
        self._complete(number)
        self._peers.check_usable()

        def free() -> None:
            what = self._describe(*self._busy[number - self._freed - 1])
            self._peers.wait(self._board.reduced, number, lambda: what, "to reduce its part")

        self._guarded(free)
        for _ in range(number - self._freed):
            self._busy.popleft()
        self._freed = number

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except BaseException as error:  # an interrupt too may leave a part half reduced: nothing can follow
            self._peers.failed(error)
            raise

    def _await_launches(self, number: int, start: int, stop: int) -> None:
        self._peers.wait(self._board.launched, number, lambda: self._describe(start, stop), "to launch it")

    def _reduce_ready(self) -> None:
        while self._pending and self._peers.all_reached(self._board.launched, self._reduced + 1):
            self._reduce(self._reduced + 1, *self._pending[0])

    def _reduce(self, number: int, start: int, stop: int, into: torch.Tensor, accumulate: bool) -> None:
        """Reduce this rank's part of the oldest pending launch, which all ranks have launched."""
        self._peers.check_same_range(number, start, stop, lambda: self._describe(start, stop))
        self._mean.reduce(self._rows, *own_part(start, stop, self._rank, self._peers.size), into, accumulate)
        self._board.reduce(number)
        self._reduced = number
        self._pending.popleft()

    def _describe(self, start: int, stop: int) -> str:
        return f"the reduce-scatter of gradient elements [{start}, {stop}) of {self.buffer.numel()}"


class _PartWork:
    """One launch on its way."""

    def __init__(self, scatterer: SharedMemoryReduceScatterer, number: int, on_part: Callable[[], None] | None) -> None:
        self._scatterer = scatterer
        self._number = number
        self._on_part = on_part

    def wait(self) -> None:
        """See `ShardWork`."""
        self._scatterer._complete(self._number)
        if self._on_part is not None:
            self._on_part()
            self._on_part = None

    def wait_free(self) -> None:
        """See `ShardWork`."""
        self.wait()
        self._scatterer._free(self._number)


class SharedMemoryGatherer:
    """`FlatGatherer` over memory that all ranks of the group map. See the module's picture.

    A rank may gather alone: it only waits until the others have published. Copies are made inside `wait`.
    """

    def __init__(
        self,
        memory: SharedMemory,
        rank: int,
        ranks: Sequence[int],
        patience: Patience,
        record: Record = record_nothing,
        progress: Progress | None = None,
    ) -> None:
        """Store the parts; parameters as for `SharedMemoryReducer`."""
        self.buffer = memory.rows[rank]
        self._rows = memory.rows
        self._rank = rank
        self._peers = Peers(
            memory.board, memory.processes, rank, ranks, patience, "parameter gatherer", progress or Progress()
        )
        self._board = memory.board
        self._record = record
        self._publication = Publication()
        self._seen_version = 0  # published by all ranks, as far as this one has looked
        self._started: weakref.WeakSet[_CopyWork] = weakref.WeakSet()  # what nobody can wait for need not be copied

    def begin_update(self) -> None:
        """See `FlatGatherer`."""
        self._peers.check_usable()
        if not self._publication.is_published:
            return
        for work in list(self._started):
            work.wait()
        version = self._publication.version
        self._board.finish(version)
        self._wait(self._board.finished, version, "the update after", "to begin its update")
        self._publication.begin_update()

    def publish(self) -> None:
        """See `FlatGatherer`."""
        self._peers.check_usable()
        self._publication.check_writing()
        self._publication.publish()
        self._board.publish(self._publication.version)

    def gather_in_place(self, start: int, stop: int) -> _CopyWork:
        """See `FlatGatherer`."""
        self._peers.check_usable()
        self._publication.check_published()
        check_parts(start, stop, self.buffer.numel(), self._peers.size)
        others = [rank for rank in range(self._peers.size) if rank != self._rank]
        parts = [(rank, *own_part(start, stop, rank, self._peers.size)) for rank in others]
        copies = [(self.buffer[low:high], self._rows[rank][low:high]) for rank, low, high in parts]
        return self._start(copies, (stop - start) * self.buffer.itemsize)

    def gather(self, start: int, stop: int, into: torch.Tensor) -> _CopyWork:
        """See `FlatGatherer`; not collective."""
        self._peers.check_usable()
        self._publication.check_published()
        check_range(start, stop, self.buffer.numel())
        check_gathered(into, self._peers.size * (stop - start), self.buffer)
        targets = into.view(self._peers.size, stop - start).unbind()
        copies = [(target, row[start:stop]) for target, row in zip(targets, self._rows, strict=True)]
        return self._start(copies, into.nbytes)

    def view(self, start: int, stop: int) -> None:
        """See `FlatGatherer`: there are other ranks' parts."""

    def close(self) -> None:
        """Leave the group and let go of the others' rows; not collective, and a second call does nothing.

        Ranks that still wait for this one get an error. `buffer` and its views live on as this process's own.
        """
        self._peers.close()
        self._rows = []

    def _start(self, copies: list[tuple[torch.Tensor, torch.Tensor]], nbytes: int) -> _CopyWork:
        work = _CopyWork(self, copies, self._record(nbytes, self._peers.size))
        self._started.add(work)
        return work

    def _copy(self, work: _CopyWork, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy what `work` asked for, once all ranks have published; works are over before the next version begins."""
        self._peers.check_usable()
        if self._seen_version < self._publication.version:
            self._wait(self._board.published, self._publication.version, "a gather of", "to publish it")
            self._seen_version = self._publication.version
        for target, source in copies:
            target.copy_(source)
        self._started.discard(work)

    def _wait(self, count: Callable[[int], int], version: int, what: str, doing: str) -> None:
        def subject() -> str:
            return f"{what} version {version} of {self.buffer.numel()} parameter elements per rank"

        try:
            self._peers.wait(count, version, subject, doing)
        except BaseException as error:  # this rank has lost step with the others: nothing can follow
            self._peers.failed(error)
            raise


class _CopyWork:
    """One gather on its way."""

    def __init__(
        self,
        gatherer: SharedMemoryGatherer,
        copies: list[tuple[torch.Tensor, torch.Tensor]],
        on_copied: Callable[[], None] | None,
    ) -> None:
        self._gatherer = gatherer
        self._copies = copies
        self._on_copied = on_copied

    def wait(self) -> None:
        """Block until what was asked for is copied; raise CommError when a rank is gone or late before it published."""
        if not self._copies:
            return
        self._gatherer._copy(self, self._copies)
        self._copies = []  # lets go of the others' rows
        if self._on_copied is not None:
            self._on_copied()
            self._on_copied = None
