"""What is asked of a back end and what is done with its answer; the back end here is a function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from deepspeed.comm import backend, collectives
from deepspeed.comm.algorithms import flat_gatherer, flat_reduce_scatterer
from deepspeed.comm.backend import BackendGatherer, BackendReduceScatterer, _Spare
from deepspeed.errors import ArgumentError, CommError, UsageError

RANK, WORLD_SIZE = 1, 4


@pytest.fixture(autouse=True)
def _fake_ranks() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD_SIZE)


class _Finish:
    """A `Work` whose result appears when it is waited for."""

    def __init__(self, finish: Callable[[], object]) -> None:
        self._finish = finish

    def wait(self) -> None:
        self._finish()


class _Backend:
    """A reduce-scatter among ranks that all contribute what this one does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = "fake") -> None:
        self.asked: list[tuple[torch.dtype, object]] = []
        monkeypatch.setattr(collectives, "reduce_scatter_range", self.reduce_scatter)
        monkeypatch.setattr(backend, "backend_name", lambda *_: name)

    def reduce_scatter(
        self, part: torch.Tensor, tensor: torch.Tensor, op: object, _group: object, async_op: bool
    ) -> _Finish:
        assert async_op
        assert part.numel() * WORLD_SIZE == tensor.numel()
        assert part.dtype == tensor.dtype
        self.asked.append((tensor.dtype, op))
        factor = 1 if op == dist.ReduceOp.AVG else WORLD_SIZE
        return _Finish(lambda: part.copy_(tensor.chunk(WORLD_SIZE)[RANK] * factor))


def _scatterer(dtype: torch.dtype = torch.float32, **options: object) -> BackendReduceScatterer:
    scatterer = flat_reduce_scatterer(16, dtype, may_share_memory=False, **options)  # type: ignore[arg-type]
    assert isinstance(scatterer, BackendReduceScatterer)
    scatterer.buffer.copy_(torch.arange(16.0))
    return scatterer


@pytest.mark.parametrize("name", ["fake", "nccl"])
@pytest.mark.parametrize("options", [{}, {"prescale": True}, {"predivide_factor": 2.0}])
def test_the_mean_is_taken_once_wherever_the_division_is_made(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, object]
) -> None:
    asked = _Backend(monkeypatch, name).asked
    for into in (None, torch.zeros(4), torch.zeros(4, dtype=torch.float64)):
        scatterer = _scatterer(**options)
        scatterer.launch(0, 16, into).wait()
        result = scatterer.buffer[4:8] if into is None else into
        assert result.tolist() == [4.0, 5.0, 6.0, 7.0]
    by_itself = name == "nccl" and not options
    assert asked == [(torch.float32, dist.ReduceOp.AVG if by_itself else dist.ReduceOp.SUM)] * 3


def test_accumulating_adds_to_the_shard_and_a_second_wait_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _Backend(monkeypatch)
    for shard in (torch.full((4,), 100.0), torch.full((4,), 100.0, dtype=torch.bfloat16)):
        work = _scatterer().launch(0, 16, shard, accumulate=True)
        assert shard.tolist() == [100.0] * 4
        for wait in (work.wait, work.wait_free, work.wait):
            wait()
        assert shard.tolist() == [104.0, 105.0, 106.0, 107.0]


def test_what_travels_has_the_communication_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _Backend(monkeypatch).asked
    for into in (None, torch.zeros(4)):
        scatterer = _scatterer(torch.bfloat16, communication_dtype=torch.float32)
        scatterer.buffer.add_(0.5)
        scatterer.launch(0, 16, into).wait()
        result = scatterer.buffer[4:8] if into is None else into
        assert result.tolist() == [4.5, 5.5, 6.5, 7.5]
    assert [dtype for dtype, _ in asked] == [torch.float32] * 2


def test_a_range_on_its_way_is_not_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _Backend(monkeypatch)
    scatterer = _scatterer()
    work = scatterer.launch(0, 8)
    scatterer.launch(8, 16)
    with pytest.raises(UsageError, match=r"launch of \[4, 12\) while \[0, 8\) of an older launch is on its way"):
        scatterer.launch(4, 12)
    work.wait_free()
    scatterer.launch(0, 8)


def test_ranges_and_shards_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _Backend(monkeypatch).asked
    for call in (
        lambda: _scatterer().launch(0, 6),
        lambda: _scatterer().launch(0, 8, torch.zeros(3)),
        lambda: _scatterer().launch(0, 8, accumulate=True),
    ):
        with pytest.raises(ArgumentError):
            call()
    _scatterer().launch(8, 8).wait()
    assert asked == []


def test_a_failed_wait_names_range_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("connection closed by peer.")

    monkeypatch.setattr(collectives, "reduce_scatter_range", lambda *_, **__: _Finish(fail))
    with pytest.raises(CommError, match=r"elements \[0, 8\) of 16 over ranks \[0, 1, 2, 3\] failed .*closed by peer"):
        _scatterer().launch(0, 8).wait()


def _gatherer(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> BackendGatherer:
    """Every rank publishes what this one does."""

    def gather(tensor: torch.Tensor, part: torch.Tensor, _group: object, async_op: bool) -> _Finish:
        assert async_op
        log.append("started")
        return _Finish(lambda: (log.append("waited"), tensor.copy_(part.clone().repeat(WORLD_SIZE))))

    monkeypatch.setattr(collectives, "gather_range", gather)
    gatherer = flat_gatherer(8, torch.float32, may_share_memory=False)
    assert isinstance(gatherer, BackendGatherer)
    gatherer.buffer.copy_(torch.arange(8.0))
    gatherer.publish()
    return gatherer


def test_ranges_are_gathered_in_place_and_into_other_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gatherer = _gatherer(monkeypatch, [])
    into = torch.empty(8)

    gatherer.gather(5, 7, into).wait()
    assert into.tolist() == [5.0, 6.0] * 4
    gatherer.gather_in_place(0, 8).wait()
    assert gatherer.buffer.tolist() == [2.0, 3.0] * 4


def test_an_update_waits_for_every_gather_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    gatherer = _gatherer(monkeypatch, log)
    first = gatherer.gather(0, 2, torch.empty(8))
    gatherer.gather(2, 4, torch.empty(8))
    first.wait()
    assert log == ["started", "started", "waited"]

    gatherer.begin_update()

    assert log == ["started", "started", "waited", "waited"]
    with pytest.raises(UsageError, match="version 2 of the buffer is being written"):
        gatherer.gather(0, 2, torch.empty(8))
    gatherer.publish()
    with pytest.raises(UsageError, match="version 2 is published"):
        gatherer.publish()


def test_an_empty_gather_makes_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    gatherer = _gatherer(monkeypatch, log)

    gatherer.gather(3, 3, torch.empty(0)).wait()
    gatherer.gather_in_place(4, 4).wait()

    assert log == []


def test_spare_memory_is_used_again_and_grows_with_what_is_asked() -> None:
    spare = _Spare(torch.float32)
    short, long = spare.take(10), spare.take(100)
    spare.give_back([short, long])

    assert spare.take(60).data_ptr() == long.data_ptr()
    again = spare.take(9)
    assert (again.data_ptr(), again.shape) == (short.data_ptr(), (9,))
    spare.give_back([again])
    assert spare.take(10).data_ptr() == short.data_ptr()  # its whole length came back
    spare.give_back([short])
    spare.take(1000)
    assert spare._free == []  # what is too short is not kept beside what replaces it
