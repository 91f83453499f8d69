r"""How ranks compare where they stand when one of them is late: a few keys in the store of the process group.

    nobody late    each rank looks now and then for the key late/n                        no other traffic
    one is late    it writes late/n; every rank now writes its report to at/<rank>, again and again, less and less often
    rank 0         reads all reports, judges (`comm.divergence.Judge`)
                     \-- certain: writes `verdict`; every rank reads it, adds to `told`, and raises it
                     \-- nobody is late any more: writes over/n; all go back to the first line, with n + 1

Rank 0 raises last, when all were told or a moment has passed: it often hosts the store.

Lives here: the protocol, one look at a time. Does not live here: when to look (`comm.watch` has the thread), what is true
(`comm.divergence`), what this rank does (`comm.ledger`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from deepspeed.comm.divergence import Judge, RankReport, positions, shortened

__all__ = ["Meeting", "Store"]

_QUICK_SECONDS = 0.2
_LOOKS_PER_SECOND_AT_MOST = 200  # of all ranks together, while nobody is late
_SLOWER = 1.25
_CALM_LOOKS = 2
_LATE_SECONDS = 8.0


class Store(Protocol):
    """What a meeting needs of `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Put a value."""

    def get(self, key: str) -> bytes:
        """Take a value, when it is there."""

    def add(self, key: str, value: int) -> int:
        """Add to a number; returns the sum."""

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""


class Meeting:
    """One rank's side. All methods but `read` are called by one thread.

    Attributes:
        verdict: why this rank must stop, once all ranks know it; empty until then.
        is_open: some rank was late and ranks report.
        world_size: ranks that compare.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        limit_seconds: float,
        report: Callable[[], RankReport],
        late_seconds: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the parts; a wait of `limit_seconds` is late."""
        self.verdict = ""
        self.is_open = False
        self._rank = rank
        self.world_size = world_size
        self._limit_seconds = limit_seconds
        self._report = report
        self._late_seconds = late_seconds
        self._time = clock
        self._number = 1
        self._pause = self.calm_seconds
        self._judge = Judge(limit_seconds)
        self._calm_looks = 0
        self._opened = 0.0
        self._announced = ("", 0.0)
        self._reports: dict[int, RankReport] = {}
        self._late_told_seconds = 0.0

    @property
    def calm_seconds(self) -> float:
        """Between looks while nobody is late; longer in large worlds, so that the store has a bounded load."""
        return max(self._limit_seconds / 4, self.world_size / _LOOKS_PER_SECOND_AT_MOST)

    @property
    def pause_seconds(self) -> float:
        """Until the next look."""
        return self._pause

    def look(self, store: Store) -> None:
        """Do what is to be done now. Blocks on a few requests to the store."""
        if self.verdict:
            return
        if not self.is_open and not self._open(store):
            return
        if self._announced[0]:
            self._tell(store)
        elif store.check(["verdict"]):
            text = store.get("verdict").decode()
            store.add("told", 1)
            self.verdict = text
        elif store.check([f"over/{self._number}"]):
            self._close()
        else:
            store.set(f"at/{self._rank}", f"{self._number}\n{self._report().to_text()}")
            self._pause = min(self._pause * _SLOWER, self.calm_seconds)
            if self._rank == 0:
                self._decide(store)

    def read(self, store: Store, ranks: Iterable[int]) -> dict[int, RankReport]:
        """The last report of each of `ranks` that wrote one in this meeting or has ended. Any thread may call this."""
        found = {}
        for rank in ranks:
            if store.check([f"at/{rank}"]):
                number, _, text = store.get(f"at/{rank}").decode().partition("\n")
                report = RankReport.from_text(text)
                if report.has_ended or int(number) == self._number:
                    found[rank] = report
        return found

    def late_text(self) -> str:
        """On rank 0, now and then while ranks wait and nothing is certain: who stands where, who does not answer."""
        seconds = max((report.late_seconds() for report in self._reports.values()), default=0.0) if self.is_open else 0.0
        if seconds < max(_LATE_SECONDS, 2 * self._late_told_seconds) or self.verdict or self._announced[0]:
            return ""
        self._late_told_seconds = seconds
        silent = [rank for rank in range(self.world_size) if rank not in self._reports]
        text = f"ranks have waited for {seconds:.0f} s: {positions(self._reports.values())}."
        if silent:
            text += (
                f" Rank(s) {shortened(silent)} do not answer: they have died, are stopped, hold Python's lock in one "
                "long call, or their hosts cannot be reached."
            )
        return text

    def leave(self, store: Store, report: RankReport) -> None:
        """Say that this rank has ended."""
        store.set(f"at/{self._rank}", f"{self._number}\n{report.to_text()}")

    def _open(self, store: Store) -> bool:
        key = f"late/{self._number}"
        if not store.check([key]):
            if self._late_seconds() < self._limit_seconds:
                return False
            store.set(key, "")
        self.is_open = True
        self._pause = max(_QUICK_SECONDS, self.world_size / _LOOKS_PER_SECOND_AT_MOST)
        self._calm_looks = 0
        self._opened = self._time()
        return True

    def _close(self) -> None:
        self.is_open = False
        self._number += 1
        self._pause = self.calm_seconds
        self._late_told_seconds = 0.0

    def _decide(self, store: Store) -> None:
        self._reports = reports = self.read(store, range(self.world_size))
        text = self._judge.look(reports)
        is_complete = len(reports) == self.world_size or self._time() >= self._opened + 1.5 * self.calm_seconds
        if text and is_complete:  # a rank that has not noticed yet is worth waiting for: the text says where it stands
            store.set("verdict", text)
            self._announced = (text, self._time() + 2 * self.calm_seconds + 1)
            self._pause = _QUICK_SECONDS
            return
        is_calm = all(report.late_seconds() < self._limit_seconds / 2 for report in reports.values())
        self._calm_looks = self._calm_looks + 1 if is_calm else 0
        if self._calm_looks >= _CALM_LOOKS:
            store.set(f"over/{self._number}", "")
            self._close()

    def _tell(self, store: Store) -> None:
        text, deadline = self._announced
        if store.add("told", 0) >= self.world_size - 1 or self._time() >= deadline:
            self.verdict = text
