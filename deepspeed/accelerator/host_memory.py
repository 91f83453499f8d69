"""How much host memory this process holds, now and at its peak.

Lives here: readings of the resident set. Called by `cpu` (whose device memory is the host's) and by `memory`.

The resident set itself stands in /proc/self/statm; where there is none, psutil says it. A run log asks at every reported
step, and to read one small file costs a third of what psutil does for it.

[Note: where the peak comes from] Linux keeps the largest resident set in /proc/self/status (VmHWM) and lets a process
start it afresh by writing 5 to /proc/self/clear_refs (proc(5)). Where either is missing or refused, the peak is the
largest figure that this object has seen since the reset: a lower bound.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import psutil

__all__ = ["HostMemory"]

_PROC = Path("/proc/self")


class HostMemory:
    """The resident set of this process, in bytes. `proc` is where the kernel's figures are; tests hand in another."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._statm = str(proc / "statm")
        self._largest_seen = 0
        self._kernel_peak_is_ours = True

    def resident_nbytes(self) -> int:
        """Return the bytes of physical memory that this process holds now."""
        resident = self._resident_now()
        self._largest_seen = max(self._largest_seen, resident)
        return resident

    def peak_nbytes(self) -> int:
        """Return the most bytes held at once since the last reset (see [Note: where the peak comes from])."""
        self.resident_nbytes()
        if self._kernel_peak_is_ours:
            self._largest_seen = max(self._largest_seen, self._kernel_peak())
        return self._largest_seen

    def reset_peak(self) -> None:
        """Let the peak start from what is held now."""
        self._largest_seen = 0
        try:
            (self._proc / "clear_refs").write_text("5")
            self._kernel_peak_is_ours = True
        except OSError:  # read-only or absent: fall back as the note says
            self._kernel_peak_is_ours = False

    def _resident_now(self) -> int:
        try:
            with open(self._statm, "rb", buffering=0) as file:
                return int(file.read().split()[1]) * mmap.PAGESIZE
        except OSError:
            resident: int = psutil.Process().memory_info().rss
            return resident

    def _kernel_peak(self) -> int:
        try:
            status = (self._proc / "status").read_text()
        except OSError:
            return 0
        found = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
