from __future__ import annotations

import logging

import pytest

from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu import CpuAccelerator
from deepspeed.accelerator.memory import MemoryTable, memory_report, see_memory_usage


class _Fixed(CpuAccelerator):
    """Figures that a test can recognise."""

    resets = 0

    def memory_allocated(self, device_index: object = None) -> int:
        return 1 << 20

    def max_memory_allocated(self, device_index: object = None) -> int:
        return 2 << 20

    def memory_reserved(self, device_index: object = None) -> int:
        return 3 << 20

    def max_memory_reserved(self, device_index: object = None) -> int:
        return 4 << 20

    def reset_peak_memory_stats(self, device_index: object = None) -> None:
        self.resets += 1


def test_the_report_holds_device_process_and_host() -> None:
    set_accelerator(_Fixed())
    report = memory_report()
    assert report[:5] == ("cpu", 1 << 20, 2 << 20, 3 << 20, 4 << 20)
    assert 0 < report.process_nbytes < report.host_total_nbytes
    assert 0 < report.host_used_nbytes < report.host_total_nbytes
    assert report.text().startswith("cpu: allocated 1.00 MiB (peak 2.00 MiB), reserved 3.00 MiB (peak 4.00 MiB) | host: ")


def test_memory_usage_is_logged_only_when_forced(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = _Fixed()
    set_accelerator(accelerator)
    with caplog.at_level(logging.INFO, logger="DeepSpeed"):
        see_memory_usage("before the first step")
        assert not caplog.records
        see_memory_usage("after the first step", force=True)
    assert [record.getMessage().split(" | ")[0] for record in caplog.records] == ["after the first step"]
    assert accelerator.resets == 1


def test_marks_are_lines_of_one_table_under_a_header_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = _Fixed()
    set_accelerator(accelerator)
    table = MemoryTable()
    with caplog.at_level(logging.INFO, logger="DeepSpeed"):
        for _ in range(25):
            table.mark("before forward")
    header, first, *_ = lines = caplog.messages
    assert header == (
        "memory | on cpu             allocated        peak    reserved        peak     process   host used  host total"
    )
    assert first.startswith("memory | before forward      1.00 MiB    2.00 MiB    3.00 MiB    4.00 MiB ")
    assert len({len(line) for line in lines}) == 1
    assert [number for number, line in enumerate(lines) if line == header] == [0, 25]
    assert accelerator.resets == 25
