"""The protocols for one rank alone, and what a caller may ask of any of them."""

from __future__ import annotations

import pytest
import torch

from deepspeed.comm.algorithms import flat_gatherer, flat_reduce_scatterer
from deepspeed.comm.flat import (
    LocalGatherer,
    LocalReduceScatterer,
    Publication,
    check_gathered,
    check_parts,
    check_target,
)
from deepspeed.errors import ArgumentError, UsageError

CPU = torch.device("cpu")


def test_without_a_process_group_a_part_is_the_whole_range_where_it_lies() -> None:
    scatterer = flat_reduce_scatterer(10, torch.bfloat16)

    assert isinstance(scatterer, LocalReduceScatterer)
    assert scatterer.buffer.tolist() == [0.0] * 10
    scatterer.buffer.copy_(torch.arange(10.0))
    work = scatterer.launch(2, 7)
    work.wait()
    work.wait_free()
    scatterer.close()
    assert scatterer.buffer.tolist() == list(range(10))


def test_a_single_rank_sets_and_adds_to_a_shard_of_another_dtype() -> None:
    scatterer = flat_reduce_scatterer(10, torch.bfloat16)
    scatterer.buffer.copy_(torch.arange(10.0))
    shard = torch.full((5,), 100.0)

    scatterer.launch(2, 7, shard, accumulate=True).wait()
    assert shard.tolist() == [102.0, 103.0, 104.0, 105.0, 106.0]
    scatterer.launch(2, 7, shard).wait()
    assert shard.tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_single_rank_gathers_a_copy_of_what_it_published() -> None:
    gatherer = flat_gatherer(10, torch.float16)
    assert isinstance(gatherer, LocalGatherer)
    into = torch.empty(3, dtype=torch.float16)

    for version in range(3):
        gatherer.begin_update()
        gatherer.buffer.copy_(torch.arange(10.0) + 10 * version)
        gatherer.publish()
        gatherer.gather_in_place(0, 10).wait()
        gatherer.gather(4, 7, into).wait()
        assert into.tolist() == [10.0 * version + e for e in (4, 5, 6)]
        assert gatherer.buffer.tolist() == [10.0 * version + e for e in range(10)]
    gatherer.close()


def test_a_single_rank_sees_what_it_published_where_it_lies() -> None:
    gatherer = flat_gatherer(10, torch.float16)
    gatherer.buffer.copy_(torch.arange(10.0))
    with pytest.raises(UsageError, match="while version 1 of the buffer is being written"):
        gatherer.view(4, 7)
    gatherer.publish()
    view = gatherer.view(4, 7)
    assert view is not None
    assert view.tolist() == [4.0, 5.0, 6.0]
    assert view.data_ptr() == gatherer.buffer[4:].data_ptr()
    assert (view.storage_offset(), view.untyped_storage().nbytes()) == (0, 6)
    assert gatherer.view(10, 10).shape == (0,)
    with pytest.raises(ArgumentError, match="for a buffer of 10 elements"):
        gatherer.view(4, 11)
    gatherer.begin_update()
    gatherer.buffer.zero_()
    assert view.tolist() == [0.0] * 3
    del gatherer
    assert view.tolist() == [0.0] * 3  # it keeps the memory


def test_what_rests_elsewhere_than_on_the_device_is_gathered() -> None:
    apart = LocalGatherer(10, torch.float16, CPU, at_rest=torch.zeros(10, dtype=torch.float16))
    elsewhere = flat_gatherer(10, torch.float16, "meta")
    for gatherer in (apart, elsewhere):
        gatherer.publish()
        assert gatherer.view(4, 7) is None


def test_buffers_lie_where_they_are_asked_for() -> None:
    for buffer in (
        flat_reduce_scatterer(10, torch.float16, "meta").buffer,
        flat_gatherer(10, torch.float16, "meta").buffer,
    ):
        assert (buffer.device.type, buffer.dtype, buffer.shape) == ("meta", torch.float16, (10,))


def test_impossible_sizes_and_factors_are_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match=r"flat_reduce_scatterer got numel=-1, predivide_factor=1\.0"):
        flat_reduce_scatterer(-1, torch.float32)
    with pytest.raises(ArgumentError, match=r"flat_reduce_scatterer got numel=3, predivide_factor=0"):
        flat_reduce_scatterer(3, torch.float32, predivide_factor=0)
    with pytest.raises(ArgumentError, match=r"flat_gatherer got numel=-1"):
        flat_gatherer(-1, torch.float32)


def test_a_range_needs_one_equal_part_per_rank() -> None:
    check_parts(2, 8, 10, 3)
    check_parts(2, 2, 10, 3)
    with pytest.raises(ArgumentError, match=r"range \[2, 9\) of 7 elements given for a group of 3 ranks"):
        check_parts(2, 9, 10, 3)
    with pytest.raises(ArgumentError, match="for a buffer of 10 elements"):
        check_parts(6, 12, 10, 3)


@pytest.mark.parametrize(
    "into", [torch.zeros(4), torch.zeros(6), torch.zeros(5, dtype=torch.int32), torch.zeros(1, 5), torch.zeros(5).to("meta")]
)
def test_a_shard_must_have_the_size_a_floating_dtype_and_the_device_of_its_part(into: torch.Tensor) -> None:
    with pytest.raises(ArgumentError, match=r"into= is .*; needed a floating dtype, shape \(5,\) on cpu"):
        check_target(into, 5, CPU, False)


def test_adding_needs_something_to_add_to() -> None:
    check_target(None, 5, CPU, False)
    check_target(torch.zeros(5, dtype=torch.float64), 5, CPU, True)
    with pytest.raises(ArgumentError, match="accumulate=True given without `into`"):
        check_target(None, 5, CPU, True)


@pytest.mark.parametrize(
    "into", [torch.zeros(5), torch.zeros(6, dtype=torch.float64), torch.zeros(2, 3), torch.zeros(12)[::2]]
)
def test_what_is_gathered_into_must_have_size_and_dtype_and_no_gaps(into: torch.Tensor) -> None:
    check_gathered(torch.zeros(6), 6, torch.zeros(3))
    with pytest.raises(ArgumentError, match=r"into= is .*; needed contiguous torch.float32, shape \(6,\) on cpu"):
        check_gathered(into, 6, torch.zeros(3))


def test_only_what_is_published_is_gathered() -> None:
    gatherer = flat_gatherer(10, torch.float32)
    for _ in range(2):
        for gather in (lambda: gatherer.gather(0, 1, torch.zeros(1)), lambda: gatherer.gather_in_place(0, 1)):
            with pytest.raises(UsageError, match=r"while version [12] of the buffer is being written"):
                gather()
        gatherer.publish()
        gatherer.gather_in_place(0, 1).wait()
        gatherer.begin_update()


def test_a_published_version_is_taken_back_before_the_next() -> None:
    publication = Publication()
    publication.check_writing()
    publication.publish()
    with pytest.raises(UsageError, match=r"while version 1 is published, which other ranks may be reading"):
        publication.check_writing()
    publication.begin_update()
    publication.begin_update()
    publication.check_writing()
    publication.publish()
    assert publication.version == 2


def test_local_calls_check_what_several_ranks_would() -> None:
    scatterer, gatherer = flat_reduce_scatterer(10, torch.float32), flat_gatherer(10, torch.float32)
    gatherer.publish()
    for call in (
        lambda: scatterer.launch(5, 11),
        lambda: scatterer.launch(0, 5, torch.zeros(4)),
        lambda: scatterer.launch(0, 5, accumulate=True),
        lambda: gatherer.gather_in_place(-1, 4),
        lambda: gatherer.gather(0, 5, torch.zeros(4)),
    ):
        with pytest.raises(ArgumentError):
            call()
    with pytest.raises(UsageError):
        gatherer.publish()
