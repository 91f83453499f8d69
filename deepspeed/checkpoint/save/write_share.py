"""Which of the ranks that hold the same values write them (`checkpoint.writer.data_parallel`).

    ranks of one replica axis     0 1 2 3     on machines  a a b b
    REPLICA, or left out          all four write a quarter each
    MACHINE                       0 and 2 write a half each: one rank's processor and one stream of bytes per machine

Pure but for `own_place`, which asks this machine. Does not live here: the pieces (the engine makes them).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

__all__ = ["Share", "Unit", "WriteShares", "held_alike", "own_place"]

Unit = Literal["REPLICA", "SOCKET", "MACHINE"]
_CPUS = Path("/sys/devices/system/cpu")


class Share(NamedTuple):
    """This rank writes the `part`-th of `parts` equal parts; part None: nothing."""

    parts: int
    part: int | None


def held_alike(rank: int, ranks: Sequence[int], beside: Sequence[int]) -> list[int]:
    """Global ranks that hold what the lines of `rank` along two axes, `ranks` and `beside`, hold alike; one axis: `ranks`.

    Numbers of ranks are sums of what their places on each axis come to, so the line beside another rank is this one, moved.
    """
    return sorted({one - rank + other for one in ranks for other in beside}) if beside else list(ranks)


class WriteShares:
    """Shares of one rank."""

    def __init__(self, rank: int, places: Mapping[int, str] | None = None) -> None:
        """Take this global rank and where each global rank runs: ranks of one place have one writer. None: all write."""
        self._rank = rank
        self._places = places

    def of(self, ranks: Sequence[int], beside: Sequence[int] = ()) -> Share:
        """This rank's share of what global ranks, itself among them, hold alike.

        Args:
            ranks: those of one axis.
            beside: those of another, where beside each of `ranks` others hold it too; this rank's own line.
        """
        if self._places is None:
            width = max(1, len(beside))
            place = beside.index(self._rank) if beside else 0
            return Share(len(ranks) * width, ranks.index(self._rank) * width + place)
        first_of: dict[str, int] = {}
        for rank in held_alike(self._rank, ranks, beside):
            first_of.setdefault(self._places[rank], rank)
        writers = list(first_of.values())
        return Share(len(writers), writers.index(self._rank) if self._rank in writers else None)


def own_place(unit: Literal["SOCKET", "MACHINE"], cpus: Path = _CPUS) -> str:
    """Name of the machine that this process runs on, or of the processor socket there of the first CPU that it may use."""
    host = socket.gethostname()
    if unit == "MACHINE":
        return host
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    package = cpus / f"cpu{allowed[0]}" / "topology" / "physical_package_id"
    return f"{host} socket {package.read_text().strip() if package.is_file() else 0}"
