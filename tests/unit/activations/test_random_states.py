"""Named random streams, on the CPU's generator."""

from __future__ import annotations

import pytest
import torch

from deepspeed import checkpointing
from deepspeed.activations.random_states import CudaRNGStatesTracker
from deepspeed.activations.settings import Settings
from deepspeed.errors import ArgumentError
from deepspeed.topology.mesh import AxisGroup


def _draw() -> float:
    return torch.rand(()).item()


def test_a_stream_goes_on_where_its_last_fork_ended_and_the_generator_as_if_nothing_was_drawn() -> None:
    tracker = CudaRNGStatesTracker()
    torch.manual_seed(5)
    outside = [_draw() for _ in range(3)]
    torch.manual_seed(9)
    inside = [_draw() for _ in range(2)]
    torch.manual_seed(5)
    tracker.add("shard", 9)
    seen = []
    for k in range(2):
        assert _draw() == outside[k]
        with tracker.fork("shard"):
            seen.append(_draw())
    assert seen == inside
    assert _draw() == outside[2]


def test_a_fork_that_raises_leaves_the_generator_as_it_was() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("shard", 9)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), tracker.fork("shard"):
        _ = _draw() / 0
    assert torch.equal(torch.get_rng_state(), before)


def test_names_and_seeds_are_used_once_and_unknown_names_are_told() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    with pytest.raises(ArgumentError, match="'a' exists already"):
        tracker.add("a", 2)
    with pytest.raises(ArgumentError, match="would draw the same"):
        tracker.add("b", 1)
    with pytest.raises(ArgumentError, match="no random stream 'b'; there are: 'a'"), tracker.fork("b"):
        pass
    tracker.reset()
    with pytest.raises(ArgumentError, match="there are: none"), tracker.fork():
        pass
    tracker.add("a", 1)


def test_states_can_be_taken_and_given_back() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    states = tracker.get_states()
    with tracker.fork("a"):
        first = _draw()
    tracker.set_states(states)
    with tracker.fork("a"):
        assert _draw() == first


@pytest.mark.parametrize("rank", [0, 1])
def test_the_model_parallel_stream_is_seeded_by_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing._current, "settings", Settings(axis=AxisGroup((0, 1), rank)))
    checkpointing.model_parallel_cuda_manual_seed(100)
    torch_first = _draw()
    torch.manual_seed(100)
    assert _draw() == torch_first
    with checkpointing.get_cuda_rng_tracker().fork():
        drawn = _draw()
    torch.manual_seed(100 + 2718 + rank)
    assert _draw() == drawn
    checkpointing.model_parallel_reconfigure_tp_seed(100)
    with checkpointing._CUDA_RNG_STATE_TRACKER.fork(checkpointing._MODEL_PARALLEL_RNG_TRACKER_NAME):
        assert _draw() == drawn


def test_reseeding_needs_the_stream() -> None:
    with pytest.raises(ArgumentError, match="model_parallel_cuda_manual_seed"):
        checkpointing.model_parallel_reconfigure_tp_seed(1)


def test_the_device_generator_can_be_set_as_megatron_does() -> None:
    state = torch.get_rng_state()
    first = _draw()
    checkpointing._set_cuda_rng_state(state)
    assert _draw() == first
