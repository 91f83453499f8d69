"""Bringing together what ranks fill in slot by slot, over ranks that are threads; see `thread_ranks`."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from deepspeed.comm.algorithms import parameter_stage
from deepspeed.comm.patience import Patience
from deepspeed.comm.staged import Filling, LocalSlots, SharedSlots, Stage, shared_nbytes
from deepspeed.errors import ArgumentError, CommError, FileIoError
from tests.unit.comm.thread_ranks import at_once, memories

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc exist on Linux alone")

NBYTES = 64


class _Read:
    """A filling that a test completes: by hand, or when it is waited for."""

    def __init__(self, slot: Tensor, value: int, error: FileIoError | None = None, *, is_slow: bool = True) -> None:
        self._slot, self._value, self._error = slot, value, error
        self.is_done = False
        if not is_slow:
            self.finish()

    def finish(self) -> None:
        self._slot.fill_(self._value)
        self.is_done = True

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        self.finish()


def _fill(value: int, error: FileIoError | None = None, *, is_slow: bool = True) -> Callable[[Tensor], Filling]:
    return lambda slot: _Read(slot, value, error, is_slow=is_slow)


def _stages(world_size: int, count: int = 2, timeout_seconds: float = 5.0) -> list[Stage]:
    ranks = [10 + rank for rank in range(world_size)]
    shared = memories(world_size, shared_nbytes(count, NBYTES), torch.uint8)
    return [Stage(SharedSlots(memory, count, rank, ranks, Patience(timeout_seconds))) for rank, memory in enumerate(shared)]


def _into(world_size: int, nbytes: int = NBYTES) -> Tensor:
    return torch.zeros(world_size * nbytes, dtype=torch.uint8)


def _rows(into: Tensor, world_size: int) -> list[list[int]]:
    return [sorted(set(row.tolist())) for row in into.view(world_size, -1)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_gets_all_slots_in_rank_order_however_often_slots_are_used_again(world_size: int) -> None:
    stages = (
        _stages(world_size, count=2) if world_size > 1 else [Stage(LocalSlots([torch.zeros(NBYTES, dtype=torch.uint8)] * 2))]
    )

    def gather(rank: int) -> list[list[list[int]]]:
        found = []
        for number in range(7):
            into = _into(world_size, 48)
            stages[rank].gather(48, _fill(10 * number + rank), into, (number, number + 1)).wait()
            found.append(_rows(into, world_size))
        return found

    with ThreadPoolExecutor(world_size) as threads:
        every = list(threads.map(gather, range(world_size)))
    assert every == [[[[10 * number + rank] for rank in range(world_size)] for number in range(7)]] * world_size


def test_gathers_may_be_waited_for_in_any_order_and_an_old_one_is_completed_when_its_slot_is_needed() -> None:
    stages = _stages(2, count=2)

    def gather(rank: int) -> list[list[list[int]]]:
        stage = stages[rank]
        intos = [_into(2) for _ in range(3)]
        first = stage.gather(NBYTES, _fill(1), intos[0], (0, 1))
        second = stage.gather(NBYTES, _fill(2), intos[1], (1, 2))
        assert stage.free_count == 0
        third = stage.gather(NBYTES, _fill(3), intos[2], (2, 3))  # completes the first
        assert _rows(intos[0], 2) == [[1], [1]]
        for work in (third, second, first):
            work.wait()
        assert stage.free_count == 2
        return [_rows(into, 2) for into in intos]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(gather, range(2))) == [[[[1], [1]], [[2], [2]], [[3], [3]]]] * 2


def test_a_filled_slot_is_offered_without_waiting_for_it() -> None:
    first, second = _stages(2)
    theirs = second.gather(NBYTES, _fill(2, is_slow=False), _into(2), (0, 1))
    second.progress()
    into = _into(2)
    first.gather(NBYTES, _fill(1), into, (0, 1)).wait()
    assert _rows(into, 2) == [[1], [2]]
    theirs.wait()


def test_an_error_of_one_rank_is_raised_on_all_and_names_the_rank_that_met_it() -> None:
    stages = _stages(3)
    broken = FileIoError(errno.EIO, "cannot read /fast/file: Input/output error")

    def gather(rank: int) -> FileIoError:
        work = stages[rank].gather(NBYTES, _fill(rank, broken if rank == 1 else None), _into(3), (0, 1))
        with pytest.raises(FileIoError) as caught:
            work.wait()
        return caught.value

    with ThreadPoolExecutor(3) as threads:
        errors = list(threads.map(gather, range(3)))
    assert [error.errno for error in errors] == [errno.EIO] * 3
    assert [str(error) for error in errors] == [f"rank 11: {broken}", str(broken), f"rank 11: {broken}"]


def test_alone_the_error_is_raised_as_it_is() -> None:
    stage = Stage(LocalSlots([torch.zeros(NBYTES, dtype=torch.uint8)]))
    broken = FileIoError(errno.EIO, "cannot read")
    with pytest.raises(FileIoError, match="cannot read"):
        stage.gather(NBYTES, _fill(0, broken), _into(1), (0, 1)).wait()


def test_ranks_that_gather_different_things_are_told() -> None:
    stages = _stages(2)

    def gather(rank: int) -> str:
        with pytest.raises(CommError) as caught:
            stages[rank].gather(NBYTES, _fill(0), _into(2), (rank, 9)).wait()
        return str(caught.value)

    with ThreadPoolExecutor(2) as threads:
        texts = list(threads.map(gather, range(2)))
    assert any("All ranks must launch the same ranges in the same order" in text for text in texts)


def test_a_rank_that_left_is_named() -> None:
    first, second = _stages(2)
    second.close()
    with pytest.raises(CommError, match="rank 11 closed its parameter stage"):
        first.gather(NBYTES, _fill(1), _into(2), (0, 1)).wait()


def test_settle_completes_everything() -> None:
    stages = _stages(2, count=3)
    intos = [[_into(2) for _ in range(3)] for _ in stages]
    for stage, own in zip(stages, intos, strict=True):
        for number, into in enumerate(own):
            stage.gather(NBYTES, _fill(number + 1), into, (number, number))
    at_once([stage.settle for stage in stages])
    assert [[_rows(into, 2) for into in own] for own in intos] == [[[[1], [1]], [[2], [2]], [[3], [3]]]] * 2
    assert [stage.free_count for stage in stages] == [3, 3]


def test_sizes_that_do_not_fit_are_refused() -> None:
    stage = Stage(LocalSlots([torch.zeros(NBYTES, dtype=torch.uint8)]))
    with pytest.raises(ArgumentError, match=f"{NBYTES + 1} bytes per rank .* slots of {NBYTES}"):
        stage.gather(NBYTES + 1, _fill(0), _into(1), (0, 1))
    with pytest.raises(ArgumentError, match="a stage of 0 slots"):
        parameter_stage(0, NBYTES, lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
