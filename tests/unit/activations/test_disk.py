"""Inputs in a file: the ways of a value, and a disk that fails."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepspeed.activations.buffers import ReusedBuffers
from deepspeed.activations.disk import DiskPlace, DiskState
from deepspeed.activations.lane import Lane
from deepspeed.errors import FileIoError
from deepspeed.ops.aio.backend import Outcome, Ticket, Transfer
from deepspeed.ops.aio.engine import IoEngine, aligned_empty


class Slow:
    """Carries nothing out until it is told; then as a file system does, or with an error."""

    kind = "slow"

    def __init__(self) -> None:
        self.waiting: list[SlowTicket] = []
        self.number = 0
        self.bytes: dict[int, bytes] = {}

    def submit(self, transfer: Transfer) -> Ticket:
        ticket = SlowTicket(self, transfer)
        self.waiting.append(ticket)
        return ticket

    def close(self) -> None:
        for ticket in list(self.waiting):
            ticket.wait(0.1)


class SlowTicket:
    def __init__(self, backend: Slow, transfer: Transfer) -> None:
        self._backend, self._transfer = backend, transfer
        self._outcome: Outcome | None = None

    def wait(self, seconds: float) -> bool:
        """Done when somebody waits for it, and not when it is only looked at."""
        if self._outcome is None and seconds > 0:
            self.carry_out()
        return self._outcome is not None

    def outcome(self) -> Outcome:
        assert self._outcome is not None
        return self._outcome

    def carry_out(self) -> None:
        import ctypes

        transfer, backend = self._transfer, self._backend
        if backend.number:
            self._outcome = Outcome(backend.number, 0)
            return
        if transfer.is_write:
            backend.bytes[transfer.offset] = ctypes.string_at(transfer.address, transfer.nbytes)
        else:
            ctypes.memmove(transfer.address, backend.bytes[transfer.offset], transfer.nbytes)
        self._outcome = Outcome(0, transfer.nbytes)


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def place(slow: Slow, tmp_path: Path) -> DiskPlace:
    return DiskPlace(IoEngine(backend=slow), tmp_path, ReusedBuffers(aligned_empty), Lane())


def _value(number: int = 1) -> Tensor:
    return torch.arange(100.0) + number


def test_a_value_is_written_read_and_read_again(place: DiskPlace) -> None:
    rest = place.put(_value())
    assert rest.state is DiskState.WRITING
    rest.advance()
    assert rest.state is DiskState.WRITING  # a look does not wait
    rest.settle()
    assert rest.state is DiskState.ON_DISK
    for _ in range(2):
        rest.bring()
        assert rest.state is DiskState.READING
        assert torch.equal(rest.value(), _value())
        assert rest.state is DiskState.ON_DISK


def test_a_value_that_is_wanted_while_it_is_written_comes_from_memory(place: DiskPlace, slow: Slow) -> None:
    rest = place.put(_value())
    assert torch.equal(rest.value(), _value())
    assert rest.state is DiskState.WRITING
    assert [ticket._transfer.is_write for ticket in slow.waiting] == [True]


def test_a_range_is_taken_by_others_only_after_its_write(place: DiskPlace, slow: Slow) -> None:
    rest = place.put(_value(1))
    del rest
    second = place.put(_value(2))
    assert place.space.end == 2 * 4096  # the first write may still arrive at the first range
    for ticket in slow.waiting:
        ticket.carry_out()
    third = place.put(_value(3))
    assert place.space.end == 2 * 4096
    second.settle()
    third.settle()
    assert torch.equal(second.value(), _value(2))
    assert torch.equal(third.value(), _value(3))


def test_staging_buffers_are_used_again(place: DiskPlace) -> None:
    made: list[int] = []
    place.staging = ReusedBuffers(lambda nbytes: made.append(nbytes) or aligned_empty(nbytes))  # type: ignore[func-returns-value]
    for number in range(5):
        place.put(_value(number)).settle()
    assert made == [4096]


def test_a_write_that_failed_is_settled_when_the_value_is_wanted_from_the_disk(place: DiskPlace, slow: Slow) -> None:
    rest = place.put(_value())
    slow.number = errno.ENOSPC
    with pytest.raises(FileIoError, match="No space left") as error:
        rest.settle()
    assert error.value.errno == errno.ENOSPC


def test_an_abandoned_write_that_failed_is_settled_by_the_next_put(place: DiskPlace, slow: Slow) -> None:
    place.put(_value())
    slow.number = errno.EIO
    for ticket in slow.waiting:
        ticket.carry_out()
    with pytest.raises(FileIoError, match="cannot write"):
        place.put(_value())
    slow.number = 0
    place.put(_value()).settle()


def test_a_read_that_failed_is_settled(place: DiskPlace, slow: Slow) -> None:
    rest = place.put(_value())
    rest.settle()
    rest.bring()
    slow.number = errno.EIO
    with pytest.raises(FileIoError, match="cannot read"):
        rest.value()


def test_a_folder_that_cannot_be_made_is_settled(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileIoError, match="no folder could be made"):
        DiskPlace(IoEngine(), tmp_path / "file", ReusedBuffers(aligned_empty), Lane())
