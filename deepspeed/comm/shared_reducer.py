"""The mean of gradients over ranks that share a host: every rank reduces a part of every rank's row.

    launch n   board[rank]: range n is [start, stop) and holds my gradients
    wait       all launched n?  ->  mean of MY part of the range over all rows, into all rows  ->  board[rank]: n reduced
               all reduced n?   ->  my row holds the mean, and nobody touches my range any more

Lives here: the all-reduce of flat buffers. Does not live here: reduce-scatter and all-gather (`comm.shared_shards`), memory
and board (`comm.shared_memory`, `comm.board`), the arithmetic (`comm.mean`). Only `comm.algorithms` calls this module.

[Note: progress] A launch stores a few words and returns; the arithmetic is shared by all ranks and runs inside `wait`, and
inside whatever else this rank waits for in shared memory (`comm.board.Progress`). So between a launch and its wait a rank
must not block on something else that another rank does only after its own wait. Programs in which all ranks run the same
calls keep this by themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from deepspeed.comm.board import Board, Peers, Progress
from deepspeed.comm.flat import Record, record_nothing
from deepspeed.comm.mean import BlockMean, MeanRule, check_range, own_part
from deepspeed.comm.patience import Patience
from deepspeed.comm.shared_memory import SharedMemory
from deepspeed.errors import UsageError

__all__ = ["SharedMemoryReducer"]

_CACHE_LINE_NBYTES = 64


class SharedMemoryReducer:
    """`FlatAllReducer` over memory that all ranks of the group map. See the module's picture.

    Numbers: `comm.mean.BlockMean`; all ranks hold the same bits. After an error the contents of ranges in flight are
    undefined and every later call raises the same error. Forked children may read `buffer` but call nothing.
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
        """Store the parts.

        Args:
            memory: what `share_memory` gave.
            rank: of this process within the group.
            ranks: the global rank of each group rank.
            rule: when to divide.
            communication_dtype: contributions are rounded to it.
            patience: how to wait, and how long.
            record: told of each launch.
            progress: that of the process; None: this reducer's own.
        """
        progress = progress or Progress()
        self.buffer = memory.rows[rank]
        self._rows = memory.rows
        self._rank = rank
        self._peers = Peers(memory.board, memory.processes, rank, ranks, patience, "gradient reducer", progress)
        self._board = memory.board
        self._mean = BlockMean(self.buffer.dtype, communication_dtype, rule)
        self._record = record
        self._launched = self._reduced = self._completed = 0
        self._in_flight: deque[tuple[int, int]] = deque()  # ranges completed + 1 ... launched
        progress.add(self)

    def launch(self, start: int, stop: int) -> _RangeWork:
        """Start the in-place mean of `buffer[start:stop]`; do not touch the range until `wait` has returned.

        Every rank of the group launches the same ranges in the same order. Returns at once, unless `Board.SLOTS`
        launches are in flight: then the oldest is waited for.

        Raises:
            ArgumentError: the range is not inside the buffer.
            UsageError: the reducer is closed, or the range overlaps one in flight.
            CommError: as for `wait`.
        """
        self._peers.check_usable()
        check_range(start, stop, self.buffer.numel())
        for low, high in self._in_flight:
            if start < high and low < stop:
                raise UsageError(
                    f"launch of [{start}, {stop}) while [{low}, {high}) is in flight; wait for that one before its elements "
                    "are reduced again."
                )
        self._complete(self._launched + 1 - Board.SLOTS)
        self._launched += 1
        self._in_flight.append((start, stop))
        self._board.launch(self._launched, start, stop)
        return _RangeWork(self, self._launched, self._record((stop - start) * self.buffer.itemsize, self._peers.size))

    def close(self) -> None:
        """Leave the group and let go of the others' rows; not collective, and a second call does nothing.

        Ranks that still wait for this one get an error. `buffer` and its views live on as this process's own.
        """
        self._peers.close()
        self._rows = []

    def _complete(self, number: int) -> None:
        """Block until range `number` and all before it hold the mean on this rank."""
        if number <= self._completed:
            return
        self._peers.check_usable()
        try:
            while self._reduced < number:  # a wait may reduce, too
                self._await_launches(self._reduced + 1)
                self._reduce_ready()
            # Ranges that all ranks have launched are reduced now too: the others then have less to wait for.
            self._reduce_ready()
            self._peers.wait(self._board.reduced, number, lambda: self._subject(number), "to reduce its part")
        except BaseException as error:  # an interrupt too may leave a range half reduced: nothing can follow
            self._peers.failed(error)
            raise
        for _ in range(number - self._completed):
            self._in_flight.popleft()
        self._completed = number

    def progress(self) -> None:
        """Reduce this rank's part of what all ranks have launched; wait for nobody."""
        if self._reduced < self._launched and self._peers.is_usable:
            try:
                self._reduce_ready()
            except BaseException as error:
                self._peers.failed(error)
                raise

    def _await_launches(self, number: int) -> None:
        self._peers.wait(self._board.launched, number, lambda: self._subject(number), "to launch it")

    def _reduce_ready(self) -> None:
        while self._reduced < self._launched and self._peers.all_reached(self._board.launched, self._reduced + 1):
            self._reduce(self._reduced + 1)

    def _reduce(self, number: int) -> None:
        start, stop = self._range(number)
        self._peers.check_same_range(number, start, stop, lambda: self._subject(number))
        alignment = max(1, _CACHE_LINE_NBYTES // self.buffer.itemsize)
        self._mean.write(self._rows, *own_part(start, stop, self._rank, self._peers.size, alignment))
        self._board.reduce(number)
        self._reduced = number

    def _range(self, number: int) -> tuple[int, int]:
        return self._in_flight[number - self._completed - 1]

    def _subject(self, number: int) -> str:
        start, stop = self._range(number)
        return f"the mean of gradient elements [{start}, {stop}) of {self.buffer.numel()}"


class _RangeWork:
    """One range in flight."""

    def __init__(self, reducer: SharedMemoryReducer, number: int, on_mean: Callable[[], None] | None) -> None:
        self._reducer = reducer
        self._number = number
        self._on_mean = on_mean

    def wait(self) -> None:
        """Block until the range holds the mean on this rank and no other rank touches it any more.

        Raises:
            CommError: a rank died, left, is late, or launched another range; the text names it.
            UsageError: the reducer was closed meanwhile.
        """
        self._reducer._complete(self._number)
        if self._on_mean is not None:
            self._on_mean()
            self._on_mean = None
