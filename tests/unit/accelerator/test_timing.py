from __future__ import annotations

import pytest

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.timing import SynchronizedWallClockTimer


def test_the_current_accelerator_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[None] = []
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda: waits.append(None))
    timers = SynchronizedWallClockTimer()
    timers("step").start()
    timers("step").stop()
    assert len(waits) == 2
    assert timers("step").elapsed() >= 0


def test_memory_is_described_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    timers = SynchronizedWallClockTimer()
    timers.log([], memory_breakdown=True)
    assert "allocated" in caplog.text
    assert "allocated" in SynchronizedWallClockTimer.memory_usage()
