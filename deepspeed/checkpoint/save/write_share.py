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

__all__ = ["Share", "Unit", "WriteShares", "own_place"]

Unit = Literal["REPLICA", "SOCKET", "MACHINE"]
_CPUS = Path("/sys/devices/system/cpu")


class Share(NamedTuple):
    """This rank writes the `part`-th of `parts` equal parts; part None: nothing."""

    parts: int
    part: int | None


class WriteShares:
    """Shares of one rank.

    [Note: two axes] What the ranks of two axes hold alike is shared along one, then along the other. Places may differ from
    one line of ranks to the next, and shares along both would not fit together: with places, the first rank of the second
    axis writes.
    """

    def __init__(self, rank: int, places: Mapping[int, str] | None = None) -> None:
        """Take this global rank and where each global rank runs: ranks of one place have one writer. None: all write."""
        self._rank = rank
        self._places = places

    def of(self, ranks: Sequence[int]) -> Share:
        """This rank's share of what the global ranks `ranks`, itself among them, hold alike."""
        if self._places is None:
            return Share(len(ranks), ranks.index(self._rank))
        first_of: dict[str, int] = {}
        for rank in ranks:
            first_of.setdefault(self._places[rank], rank)
        writers = list(first_of.values())
        return Share(len(writers), writers.index(self._rank) if self._rank in writers else None)

    def along(self, share: Share, ranks: Sequence[int]) -> Share:
        """This rank's share of what `share` says, where the ranks of another axis hold it too; see [Note: two axes]."""
        place = ranks.index(self._rank)
        if self._places is not None:
            return share if place == 0 else Share(share.parts, None)
        return Share(share.parts * len(ranks), None if share.part is None else share.part * len(ranks) + place)


def own_place(unit: Literal["SOCKET", "MACHINE"], cpus: Path = _CPUS) -> str:
    """Name of the machine that this process runs on, or of the processor socket there of the first CPU that it may use."""
    host = socket.gethostname()
    if unit == "MACHINE":
        return host
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    package = cpus / f"cpu{allowed[0]}" / "topology" / "physical_package_id"
    return f"{host} socket {package.read_text().strip() if package.is_file() else 0}"
