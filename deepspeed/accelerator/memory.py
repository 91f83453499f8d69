"""How much memory this process and its device use: figures, a line of text, the line in the log, and lines of a table.

The figures come from the accelerator and the operating system; how bytes are printed is `common.memory`.

Called as `deepspeed.runtime.utils.see_memory_usage`, by the engine for `memory_breakdown` (`MemoryTable`), and by
`accelerator.timing`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import psutil

from deepspeed.accelerator.host_memory import HostMemory
from deepspeed.accelerator.select import get_accelerator
from deepspeed.common.logging import log_dist
from deepspeed.common.memory import format_nbytes

__all__ = ["MemoryReport", "MemoryTable", "memory_report", "see_memory_usage"]

_ROWS_UNDER_A_HEADER = 24
_COLUMNS = ("allocated", "peak", "reserved", "peak", "process", "host used", "host total")
_LABEL_WIDTH, _CELL_WIDTH = 16, 12  # "1023.99 MiB" and a space


class MemoryReport(NamedTuple):
    """Bytes in use at one moment."""

    device_name: str
    allocated_nbytes: int
    peak_allocated_nbytes: int
    reserved_nbytes: int
    peak_reserved_nbytes: int
    process_nbytes: int
    host_used_nbytes: int
    host_total_nbytes: int

    def text(self) -> str:
        """Return the report as one line."""
        return (
            f"{self.device_name}: allocated {format_nbytes(self.allocated_nbytes)} "
            f"(peak {format_nbytes(self.peak_allocated_nbytes)}), reserved {format_nbytes(self.reserved_nbytes)} "
            f"(peak {format_nbytes(self.peak_reserved_nbytes)}) | "
            f"host: this process {format_nbytes(self.process_nbytes)}, all {format_nbytes(self.host_used_nbytes)} "
            f"of {format_nbytes(self.host_total_nbytes)}"
        )


def memory_report() -> MemoryReport:
    """Return what the current device, this process and this host use now. On the CPU the device is this process."""
    accelerator = get_accelerator()
    host = psutil.virtual_memory()
    return MemoryReport(
        device_name=accelerator.current_device_name(),
        allocated_nbytes=accelerator.memory_allocated(),
        peak_allocated_nbytes=accelerator.max_memory_allocated(),
        reserved_nbytes=accelerator.memory_reserved(),
        peak_reserved_nbytes=accelerator.max_memory_reserved(),
        process_nbytes=HostMemory().resident_nbytes(),
        host_used_nbytes=host.total - host.available,
        host_total_nbytes=host.total,
    )


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log `message` and the memory in use on rank 0, and start the device's peaks afresh.

    Args:
        message: what has just happened, put before the figures.
        force: False does nothing, so that calls may stay in the code.
    """
    if not force:
        return
    log_dist(f"{message} | {memory_report().text()}")
    get_accelerator().reset_peak_memory_stats()


class MemoryTable:
    """Memory in use at places that come again and again, one line each in the log of rank 0, in columns."""

    def __init__(self) -> None:
        self._rows = 0

    def mark(self, label: str) -> None:
        """Log a line for `label`, under a header every so often, and start the device's peaks afresh."""
        report = memory_report()
        if self._rows % _ROWS_UNDER_A_HEADER == 0:
            log_dist(_row(f"on {report.device_name}", _COLUMNS))
        self._rows += 1
        log_dist(_row(label, [format_nbytes(nbytes) for nbytes in report[1:]]))
        get_accelerator().reset_peak_memory_stats()


def _row(label: str, cells: Iterable[str]) -> str:
    return f"memory | {label:<{_LABEL_WIDTH}}" + "".join(f"{cell:>{_CELL_WIDTH}}" for cell in cells)
