from __future__ import annotations

import psutil
import pytest
import torch

from deepspeed.accelerator.cpu import CpuAccelerator, NullEvent, NullStream
from deepspeed.errors import AcceleratorError


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 1),
        ({"LOCAL_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "3"}, 3),
        ({"LOCAL_SIZE": "2", "LOCAL_WORLD_SIZE": "3"}, 2),
    ],
)
def test_the_number_of_devices_is_the_number_of_local_ranks(environ: dict[str, str], count: int) -> None:
    assert CpuAccelerator(environ).device_count() == count


def test_the_current_device_is_the_local_rank_until_another_is_set() -> None:
    accelerator = CpuAccelerator({"LOCAL_RANK": "2"})
    assert accelerator.current_device() == 2
    accelerator.set_device(5)
    assert accelerator.current_device() == 5
    accelerator.set_device(torch.device("cpu:1"))
    assert accelerator.current_device() == 1


def test_every_index_names_the_device_that_tensors_report() -> None:
    accelerator = CpuAccelerator({"LOCAL_RANK": "1"})
    assert torch.device(accelerator.current_device_name()) == torch.ones(1).device
    assert torch.device(accelerator.device_name(1)) == torch.ones(1).device


def test_it_is_a_synchronized_device_with_gloo() -> None:
    accelerator = CpuAccelerator()
    assert accelerator.is_available()
    assert accelerator.is_synchronized_device()
    assert accelerator.use_host_timers()
    assert accelerator.resolves_data_dependency()
    assert accelerator.handles_memory_backpressure()
    assert accelerator.communication_backend_name() == "gloo"
    assert accelerator.on_accelerator(torch.ones(1))
    assert not accelerator.on_accelerator(torch.ones(1, device="meta"))
    accelerator.synchronize()


def test_every_dtype_it_claims_can_be_multiplied() -> None:
    dtypes = CpuAccelerator().supported_dtypes()
    assert dtypes[0] == torch.float32
    assert set(dtypes) == {torch.float32, torch.float16, torch.bfloat16, torch.float64}
    for dtype in dtypes:
        one = torch.ones(2, 2, dtype=dtype)
        assert torch.equal(one @ one, 2 * one)


def test_random_states_are_those_of_the_host_generator() -> None:
    accelerator = CpuAccelerator()
    accelerator.manual_seed(7)
    assert accelerator.initial_seed() == 7
    state = accelerator.get_rng_state()
    first = torch.rand(3)
    accelerator.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    accelerator.manual_seed_all(7)
    assert torch.equal(torch.rand(3), first)
    assert accelerator.default_generator(0) is torch.default_generator
    assert accelerator.random() is torch.random


def test_memory_figures_follow_a_large_tensor() -> None:
    accelerator = CpuAccelerator()
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    nbytes = 64 << 20
    tensor = torch.ones(nbytes, dtype=torch.uint8)
    assert accelerator.memory_allocated() - before > nbytes // 2
    del tensor
    assert accelerator.max_memory_allocated() - before > nbytes // 2
    assert accelerator.max_memory_reserved() >= accelerator.memory_reserved() > 0
    assert accelerator.max_memory_cached() >= accelerator.memory_cached() > 0
    assert accelerator.total_memory() == psutil.virtual_memory().total
    assert 0 < accelerator.available_memory() < accelerator.total_memory()
    stats = accelerator.memory_stats()
    assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] > 0
    accelerator.empty_cache()


def test_constructors_are_the_types_of_torch() -> None:
    accelerator = CpuAccelerator()
    assert accelerator.LongTensor([1, 2]).dtype == torch.int64
    assert isinstance(torch.ones(1), accelerator.FloatTensor)
    names = ("BFloat16Tensor", "ByteTensor", "DoubleTensor", "HalfTensor", "IntTensor")
    dtypes = [getattr(accelerator, name)(2).dtype for name in names]
    assert dtypes == [torch.bfloat16, torch.uint8, torch.float64, torch.float16, torch.int32]


def test_nothing_is_pinned_and_nothing_is_copied() -> None:
    accelerator = CpuAccelerator()
    tensor = torch.ones(3)
    assert accelerator.pin_memory(tensor) is tensor
    assert not accelerator.is_pinned(tensor)
    accelerator.unpin_memory(tensor)
    assert not accelerator.register_host_memory(tensor)
    assert not accelerator.unregister_host_memory(tensor)
    assert accelerator.pin_empty(2, 3, dtype=torch.int8).shape == (2, 3)
    like = accelerator.pin_empty_like(torch.ones(4, dtype=torch.bfloat16))
    assert like.shape == (4,)
    assert like.dtype == torch.bfloat16
    assert accelerator.pin_memory_alignment() == 1


def test_streams_order_nothing_and_can_be_used_as_real_ones_are() -> None:
    accelerator = CpuAccelerator()
    side = accelerator.Stream()
    with accelerator.stream(side), accelerator.device(0):
        side.wait_stream(accelerator.current_stream())
        event = side.record_event()
        side.wait_event(event)
    assert side.query()
    assert event.query()
    assert accelerator.current_stream() is accelerator.default_stream()
    side.synchronize()
    event.synchronize()
    event.wait()
    assert isinstance(side, NullStream)


def test_events_measure_time_once_both_are_recorded() -> None:
    start, end = CpuAccelerator().Event(enable_timing=True), NullEvent()
    start.record()
    with pytest.raises(AcceleratorError, match="two recorded events"):
        start.elapsed_time(end)
    end.record()
    assert 0 <= start.elapsed_time(end) < 60_000


def test_a_lazy_call_runs_at_once() -> None:
    calls: list[int] = []
    CpuAccelerator().lazy_call(lambda: calls.append(1))
    assert calls == [1]


def test_profiler_ranges_may_be_opened_where_there_is_no_profiler() -> None:
    accelerator = CpuAccelerator()
    accelerator.range_push("step", domain="d", category="c")
    accelerator.range_pop()
    assert not accelerator.is_triton_supported()
    assert not accelerator.prefer_triton_grouped_mm()
