"""Copies beside the computation: what an accelerator with streams is asked for, in order. The device is a stand-in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu import CpuAccelerator
from deepspeed.activations import lane as lane_module
from deepspeed.activations.buffers import ReusedBuffers
from deepspeed.activations.disk import DiskPlace, DiskState
from deepspeed.activations.host import HostPlace
from deepspeed.activations.lane import Lane
from deepspeed.offload import placement
from deepspeed.ops.aio.engine import IoEngine, aligned_empty


class Event:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.is_over = log, name, False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")
        self.is_over = True


class Stream:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.events = log, name, 0

    def wait_stream(self, other: Any) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Event:
        self.events += 1
        self.log.append(f"{self.name} records {self.events}")
        return Event(self.log, f"{self.name} {self.events}")


class Streams(CpuAccelerator):
    """A CPU that has streams."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.computation = Stream(self.log, "computation")

    @property
    def Stream(self) -> Any:
        return lambda: Stream(self.log, "lane")

    def current_stream(self, device_index: Any = None) -> Any:
        return self.computation

    def stream(self, stream: Any) -> Any:
        @contextlib.contextmanager
        def on() -> Iterator[None]:
            self.log.append(f"on {stream.name}")
            yield

        return on()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    accelerator = Streams()
    set_accelerator(accelerator)
    monkeypatch.setattr(placement, "is_host_apart", lambda device: True)

    def keep_for(tensor: Tensor, stream: Any) -> None:
        accelerator.log.append(f"{stream.name} keeps")

    monkeypatch.setattr(lane_module, "_keep_for", keep_for)
    return accelerator.log


BACK_FROM_STAGING = [
    *("on lane", "lane records 2"),
    "host waits for lane 2",  # a read into the same buffer would be no work of the lane
    *("computation waits for lane 2", "computation keeps"),
]
OUT = ["lane waits for computation", "on lane", "lane keeps", "lane records 1"]


def test_a_value_leaves_after_what_made_it_and_is_used_after_it_has_come_back(log: list[str]) -> None:
    rest = HostPlace(ReusedBuffers(aligned_empty), Lane()).put(torch.arange(4.0))
    assert log == OUT
    log.clear()
    rest.bring()
    rest.bring()
    assert log == ["on lane", "lane records 2"]  # once, and the computation does not wait yet
    log.clear()
    assert rest.value().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert log == ["computation waits for lane 2", "computation keeps"]


def test_a_value_is_written_when_it_has_arrived_on_the_host(log: list[str], tmp_path: Path) -> None:
    place = DiskPlace(IoEngine(), tmp_path, ReusedBuffers(aligned_empty), Lane())
    rest = place.put(torch.arange(4.0))
    assert log == OUT
    rest.advance()
    assert rest.state is DiskState.COPYING
    log.clear()
    assert rest.value().tolist() == [0.0, 1.0, 2.0, 3.0]  # from the staging buffer, in the lane's order
    assert log == BACK_FROM_STAGING
    log.clear()
    rest.settle()
    assert log == ["host waits for lane 1"]
    assert rest.state is DiskState.ON_DISK
    log.clear()
    assert rest.value().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert log == [line.replace("2", "3") for line in BACK_FROM_STAGING]


def test_a_value_that_is_dropped_while_it_is_copied_gives_its_range_back(log: list[str], tmp_path: Path) -> None:
    place = DiskPlace(IoEngine(), tmp_path, ReusedBuffers(aligned_empty), Lane())
    rest = place.put(torch.arange(4.0))
    log.clear()
    del rest
    assert log == ["host waits for lane 1"]
    assert place.space.free_nbytes == place.space.end == 4096
