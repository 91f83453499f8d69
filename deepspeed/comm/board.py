"""What ranks that share memory tell each other, and how one waits for the others.

    board      rank 0: launched | reduced | state | published | finished | ranges      one line per rank: only that rank
               rank 1: launched | reduced | state | published | finished | ranges      writes it, all read it
    Peers      "wait until all ranks have counted to n": returns, or raises an error that says who is missing and why
    Progress   what this rank can do for others meanwhile

Lives here: the words and the waiting. Does not live here: the memory under the board (`comm.shared_memory`), how to wait
(`comm.patience`), what is done between two counts (`comm.shared_reducer`, `comm.shared_shards`, which call this).

[Note: memory order] The words of the board are plain 8-byte loads and stores. x86-64 keeps the order of ordinary stores and
of ordinary loads, and no store passes an earlier load; an uncontended lock is a full fence for the rest (streaming stores of
kernels). Other processors promise less, so they use the back end.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from deepspeed.comm.meter import METER
from deepspeed.comm.patience import Patience, ProcessIdentity
from deepspeed.comm.watch import WATCH, late, worked
from deepspeed.errors import CommError, UsageError

__all__ = ["Board", "Peers", "Progress"]


class Board:
    """What the ranks of one group tell each other: a line of 64-bit words per rank, written by that rank alone.

        launched | reduced | state | published | finished | range of launch n in slot n % SLOTS, as (start, stop)

    All but the ranges lie on cache lines of their own. A slot is free again when all ranks have reduced its launch.
    """

    SLOTS = 256
    OPEN, LEFT, FAILED = 0, 1, 2
    _LAUNCHED, _REDUCED, _STATE, _PUBLISHED, _FINISHED, _RANGES = 0, 8, 16, 24, 32, 40
    _LINE = 1024
    """Words per rank: two pages, so that lines of different ranks share no page."""

    def __init__(self, words: memoryview, rank: int) -> None:
        """Store the words of all ranks (format "q" or "l") and whose line this process writes."""
        self._words = words
        self._line = rank * self._LINE
        self._fence = threading.Lock()
        self._owner_pid = os.getpid()

    @classmethod
    def nbytes(cls, world_size: int) -> int:
        """Memory of a board of that many ranks."""
        return world_size * cls._LINE * 8

    def launch(self, number: int, start: int, stop: int) -> None:
        """Say that this rank's range `number` (from 1) is ready to be reduced."""
        slot = self._slot(self._line, number)
        self._words[slot], self._words[slot + 1] = start, stop
        self._say(self._LAUNCHED, number)

    def reduce(self, number: int) -> None:
        """Say that this rank has reduced its part of range `number`: into all rows, or into its own shard."""
        worked()
        self._say(self._REDUCED, number)

    def publish(self, version: int) -> None:
        """Say that this rank's row holds version `version` (from 1), to be read by all."""
        self._say(self._PUBLISHED, version)

    def finish(self, version: int) -> None:
        """Say that this rank reads no more of the rows' version `version`."""
        self._say(self._FINISHED, version)

    def leave(self, state: int) -> None:
        """Say that this rank goes (LEFT or FAILED). Not said by a forked child, and the first reason stays."""
        if os.getpid() == self._owner_pid and self._words[self._line + self._STATE] == self.OPEN:
            self._say(self._STATE, state)

    def launched(self, rank: int) -> int:
        """Ranges that `rank` has launched."""
        return self._words[rank * self._LINE + self._LAUNCHED]  # type: ignore[no-any-return, unused-ignore]

    def reduced(self, rank: int) -> int:
        """Ranges of which `rank` has reduced its part."""
        return self._words[rank * self._LINE + self._REDUCED]  # type: ignore[no-any-return, unused-ignore]

    def published(self, rank: int) -> int:
        """Version that `rank` published last."""
        return self._words[rank * self._LINE + self._PUBLISHED]  # type: ignore[no-any-return, unused-ignore]

    def finished(self, rank: int) -> int:
        """Version that `rank` has done with."""
        return self._words[rank * self._LINE + self._FINISHED]  # type: ignore[no-any-return, unused-ignore]

    def state(self, rank: int) -> int:
        """OPEN, LEFT or FAILED."""
        return self._words[rank * self._LINE + self._STATE]  # type: ignore[no-any-return, unused-ignore]

    def range(self, rank: int, number: int) -> tuple[int, int]:
        """The range that `rank` launched as `number`, one of its last `SLOTS`."""
        slot = self._slot(rank * self._LINE, number)
        return self._words[slot], self._words[slot + 1]

    def _slot(self, line: int, number: int) -> int:
        return line + self._RANGES + 2 * (number % self.SLOTS)

    def _say(self, word: int, value: int) -> None:
        with self._fence:  # [Note: memory order]: all earlier stores are visible before this word is
            pass
        self._words[self._line + word] = value


class _Helper(Protocol):
    """Something that others may be waiting for."""

    def progress(self) -> None:
        """Do this rank's part of what all ranks have launched, if anything; wait for nobody."""


class Progress:
    """What a waiting rank does for others, so that ranks may wait for different things in different order.

    Say rank 0 waits for a range of one buffer and rank 1 for one of another, and each has launched both: each does its part
    of what the other waits for. One object serves all buffers of a process; it helps only what the same thread has built,
    and forgets what is no longer used.
    """

    def __init__(self) -> None:
        """Start with nothing to do."""
        self._helpers: list[tuple[weakref.ref[_Helper], int]] = []

    def add(self, helper: _Helper) -> None:
        """Let `helper` go on whenever this thread waits."""
        alive = [entry for entry in self._helpers if entry[0]() is not None]
        self._helpers = [*alive, (weakref.ref(helper), threading.get_ident())]

    def make(self) -> None:
        """Let all go on."""
        me = threading.get_ident()
        for reference, thread in self._helpers:  # asked at every turn of a wait: a plain list, never changed in place
            helper = reference() if thread == me else None
            if helper is not None:
                helper.progress()


class Peers:
    """The ranks that share a board, as one of them sees them: it waits for them, fails with them, and leaves them.

    After a failure, or once closed, nothing goes on: `check_usable` raises.
    """

    def __init__(
        self,
        board: Board,
        processes: Sequence[ProcessIdentity],
        rank: int,
        ranks: Sequence[int],
        patience: Patience,
        noun: str,
        progress: Progress,
    ) -> None:
        """Store the parts.

        Args:
            board: of this group.
            processes: who writes which line of it.
            rank: of this process within the group.
            ranks: the global rank of each group rank.
            patience: how to wait, and how long.
            noun: what the ranks share, for texts: "reducer".
            progress: what to do while waiting.
        """
        self.board = board
        self.size = len(ranks)
        self.patience = patience
        self._processes = processes
        WATCH.know_neighbours(dict(zip(ranks, processes, strict=True)))
        self._rank = rank
        self._ranks = ranks
        self._noun = noun
        self._progress = progress
        self._failure = ""
        self._is_closed = False
        self._leave = weakref.finalize(self, board.leave, Board.LEFT)  # also runs when the interpreter ends

    def check_usable(self) -> None:
        """Raise UsageError when closed, CommError after a failure."""
        if self._is_closed:
            raise UsageError(f"this {self._noun} is closed; build a new one to go on.")
        if self._failure:
            raise CommError(f"this {self._noun} cannot go on after its first error: {self._failure}")

    def close(self) -> None:
        """Tell the others that this rank goes; a second call does nothing."""
        self._leave()
        self._is_closed = True

    @property
    def is_usable(self) -> bool:
        """Whether `check_usable` would pass."""
        return not self._is_closed and not self._failure

    def failed(self, error: BaseException) -> None:
        """Keep what ended the work of this rank, and tell the others. Anything counts, an interrupt too."""
        self._failure = self._failure or str(error) or repr(error)
        self.board.leave(Board.FAILED)

    def all_reached(self, count: Callable[[int], int], number: int) -> bool:
        """Whether `count(rank) >= number` on all ranks now."""
        return all(count(rank) >= number for rank in range(self.size))

    def wait(
        self,
        count: Callable[[int], int],
        number: int,
        subject: Callable[[], str],
        doing: str,
    ) -> None:
        """Block until `count(rank) >= number` on all ranks; help others meanwhile.

        Args:
            count: one of the board's questions.
            number: what all must have reached.
            subject: what is waited for, for the error: "the mean of ...".
            doing: what the others have not done yet: "to launch it".

        Raises:
            CommError: a rank died, left or failed before it reached the number, or the time is over.
        """
        missing = list(range(self.size))
        began = time.monotonic()

        def is_ready() -> bool:
            while missing and count(missing[-1]) >= number:
                missing.pop()
            if missing:
                self._progress.make()
            return not missing

        def look() -> None:
            behind = [self._ranks[rank] for rank in missing if count(rank) < number]
            late(f"{subject()}, {doing}", behind, time.monotonic() - began)
            gone = {rank: reason for rank in missing if (reason := self._reason_gone(rank))}
            if any(count(rank) < number for rank in gone):  # asked again: a rank may go after it has done its share
                causes = "; ".join(f"rank {self._ranks[rank]} {reason}" for rank, reason in gone.items())
                self._refuse_explained(
                    subject(), f"cannot complete: {causes}. The log of the rank that went first holds the cause"
                )

        is_met = self.patience.until(is_ready, look)
        if METER.is_on:
            METER.waited(time.monotonic() - began)
        if not is_met:
            behind = [self._ranks[rank] for rank in missing if count(rank) < number]
            self._refuse_explained(
                subject(),
                f"did not complete within {self.patience.timeout_seconds:g} s: waiting for rank(s) {behind} {doing}. They "
                "hang or do other work: see their output. If they are only slow, raise DEEPSPEED_TIMEOUT (minutes)",
            )

    def check_same_range(self, number: int, start: int, stop: int, subject: Callable[[], str]) -> None:
        """Raise CommError unless every rank launched `[start, stop)` as its launch `number`; all have launched it.

        Called before the arithmetic of each launch.
        """
        worked()
        for rank in range(self.size):
            theirs = self.board.range(rank, number)
            if theirs != (start, stop):
                self.refuse(
                    subject(),
                    f"cannot be taken: rank {self._ranks[rank]} launched {list(theirs)} as its launch number {number}. "
                    "All ranks must launch the same ranges in the same order",
                )

    def _refuse_explained(self, subject: str, text: str) -> NoReturn:
        """Raise what the watch knows: its verdict, or the error with where the others stand."""
        known = WATCH.explain(self._ranks)
        WATCH.check()
        self.refuse(subject, f"{text}{'. ' if known else ''}{known.removesuffix('.')}")

    def refuse(self, subject: str, text: str) -> NoReturn:
        """Raise CommError about `subject`."""
        raise CommError(f"rank {self._ranks[self._rank]}: {subject} over ranks {list(self._ranks)} {text}.")

    def _reason_gone(self, rank: int) -> str:
        if not self._processes[rank].is_alive():
            return f"(process {self._processes[rank].pid}) died"
        state = self.board.state(rank)
        return {Board.OPEN: "", Board.LEFT: f"closed its {self._noun} or ended", Board.FAILED: "failed"}[state]
