"""A name is told to the device's own profiler too, and ends however the call ends."""

from __future__ import annotations

import pytest

from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu import CpuAccelerator
from deepspeed.engine.named_ranges import _in_range
from deepspeed.engine.replaced import ReplacedMethods


class _Device(CpuAccelerator):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        self.told.append(msg)

    def range_pop(self) -> None:
        self.told.append("end")


class _Pass:
    def run(self, value: int) -> int:
        if value < 0:
            raise ValueError(value)
        return 2 * value


def test_a_range_of_the_device_surrounds_the_call() -> None:
    device, each, methods = _Device(), _Pass(), ReplacedMethods()
    set_accelerator(device)
    methods.replace(each, "run", _in_range("forward"))
    assert each.run(2) == 4
    with pytest.raises(ValueError, match="-1"):
        each.run(-1)
    methods.restore()
    assert each.run(3) == 6
    assert device.told == ["forward", "end", "forward", "end"]
