from __future__ import annotations

import resource
from pathlib import Path

import psutil
import pytest

from deepspeed.accelerator.host_memory import HostMemory


def test_what_is_held_is_what_psutil_says() -> None:
    held = HostMemory().resident_nbytes()
    assert held == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)  # the two ask one after the other


def test_what_is_held_is_read_from_the_kernels_pages(tmp_path: Path) -> None:
    (tmp_path / "statm").write_text("900 700 20 1 0 300 0\n")
    assert HostMemory(tmp_path).resident_nbytes() == 700 * resource.getpagesize()


def test_the_peak_is_the_kernels_where_the_kernel_tells_it(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tx\nVmHWM:\t 99999999999 kB\nVmRSS:\t 1 kB\n")
    assert HostMemory(tmp_path).peak_nbytes() == 99999999999 * 1024


def test_without_the_kernels_figure_the_peak_is_the_largest_seen(tmp_path: Path) -> None:
    memory = HostMemory(tmp_path / "absent")
    seen = memory.resident_nbytes()
    assert memory.peak_nbytes() >= seen > 0


def test_a_reset_that_the_kernel_refuses_forgets_the_kernels_peak(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmHWM:\t 99999999999 kB\n")
    (tmp_path / "clear_refs").mkdir()  # writing to it fails
    memory = HostMemory(tmp_path)
    memory.reset_peak()
    assert 0 < memory.peak_nbytes() < 99999999999 * 1024


def test_a_reset_asks_the_kernel_to_start_its_peak_afresh(tmp_path: Path) -> None:
    HostMemory(tmp_path).reset_peak()
    assert (tmp_path / "clear_refs").read_text() == "5"
