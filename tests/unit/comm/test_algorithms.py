from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from deepspeed.comm.algorithms import BackendReducer, LocalReducer, flat_all_reducer
from deepspeed.comm.mean import MeanRule
from deepspeed.errors import ArgumentError, CommError


def test_without_a_process_group_the_mean_is_there_already() -> None:
    reducer = flat_all_reducer(10, torch.float32)

    assert isinstance(reducer, LocalReducer)
    assert reducer.buffer.tolist() == [0.0] * 10
    reducer.buffer.fill_(3)
    reducer.launch(2, 7).wait()
    reducer.close()
    assert reducer.buffer.tolist() == [3.0] * 10


def test_a_buffer_lies_where_it_is_asked_for() -> None:
    assert flat_all_reducer(10, torch.float16, "meta").buffer.device.type == "meta"
    assert flat_all_reducer(10, torch.float16, "meta").buffer.dtype is torch.float16


def test_an_empty_buffer_needs_nobody() -> None:
    reducer = flat_all_reducer(0, torch.float32)

    reducer.launch(0, 0).wait()

    assert isinstance(reducer, LocalReducer)
    assert reducer.buffer.numel() == 0


@pytest.mark.parametrize(("numel", "factor"), [(-1, 1.0), (10, 0.0), (10, -2.0)])
def test_impossible_sizes_and_factors_are_refused(numel: int, factor: float) -> None:
    with pytest.raises(ArgumentError, match=rf"numel={numel}, predivide_factor={factor}"):
        flat_all_reducer(numel, torch.float32, predivide_factor=factor)


def test_a_range_outside_the_buffer_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"\[5, 11\)"):
        flat_all_reducer(10, torch.float32).launch(5, 11)


@pytest.fixture
def _a_thousand_fake_ranks() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=1000)


@pytest.mark.usefixtures("_a_thousand_fake_ranks")
def test_a_back_end_that_only_pretends_is_never_waited_for_in_shared_memory() -> None:
    reducer = flat_all_reducer(10, torch.float32)

    assert isinstance(reducer, BackendReducer)
    reducer.launch(0, 10).wait()


@pytest.mark.usefixtures("_a_thousand_fake_ranks")
def test_each_rank_divides_once_before_or_after_the_sum() -> None:
    """The fake sum leaves the input, so what is left is what the rule divides by, over both places."""
    for options in ({}, {"prescale": True}, {"predivide_factor": 8.0}):
        reducer = flat_all_reducer(4, torch.float64, **options)  # type: ignore[arg-type]
        reducer.buffer.fill_(1000)
        work = reducer.launch(0, 4)
        work.wait()
        work.wait()
        assert reducer.buffer.tolist() == [1.0] * 4


@pytest.mark.usefixtures("_a_thousand_fake_ranks")
def test_an_empty_range_makes_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    reducer = flat_all_reducer(4, torch.float64)
    monkeypatch.setattr(dist, "all_reduce", pytest.fail)

    reducer.launch(2, 2).wait()


class _FailsOnWait:
    def wait(self) -> None:
        raise RuntimeError("connection closed by peer.")


@pytest.mark.usefixtures("_a_thousand_fake_ranks")
def test_a_failed_wait_names_the_range_and_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    reducer = BackendReducer(
        10, torch.float32, torch.device("cpu"), None, [4, 5], MeanRule(2), communication_dtype=torch.float32
    )
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: _FailsOnWait())

    with pytest.raises(CommError, match=r"elements \[2, 6\) of 10 over ranks \[4, 5\].*connection closed by peer"):
        reducer.launch(2, 6).wait()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no rank can share memory, and the reason is that")
@pytest.mark.usefixtures("_a_thousand_fake_ranks")
def test_the_reason_for_the_back_end_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    from deepspeed.common.logging import set_rank

    set_rank(0)
    with caplog.at_level("INFO", logger="DeepSpeed"):
        for _ in range(3):
            flat_all_reducer(10, torch.float32)

    assert [record.getMessage().count("only pretends to gather") for record in caplog.records] == [1]
