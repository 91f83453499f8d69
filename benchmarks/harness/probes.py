"""What the kernel says of this process: processor time and memory. Memory is read from /proc, so it needs Linux."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc/self")


def processor_seconds() -> float:
    """User and system time of this process and of the children it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@dataclass(frozen=True)
class Memory:
    """Resident MiB: `rss` counts every page, `pss` each page divided by the number of processes that map it."""

    rss_mib: float
    pss_mib: float


def memory() -> Memory:
    """Resident memory now."""
    found = _kib(_PROC / "smaps_rollup")
    return Memory(found["Rss"] / 1024, found["Pss"] / 1024)


def peak_rss_mib() -> float:
    """The most that was resident since the last `reset_peak` (VmHWM)."""
    return _kib(_PROC / "status")["VmHWM"] / 1024


def reset_peak() -> None:
    """Let VmHWM start again from what is resident now."""
    (_PROC / "clear_refs").write_text("5")


def _kib(file: Path) -> dict[str, int]:
    fields = (line.split() for line in file.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in fields if len(words) == 3 and words[2] == "kB"}
