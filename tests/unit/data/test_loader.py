"""The loader against torch's own, its place in the data, and datasets it cannot serve."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from deepspeed.data import DeepSpeedDataLoader, RepeatingLoader
from deepspeed.data import loader as loader_module
from deepspeed.errors import UnbuiltFeatureError, UsageError


class Numbers(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def made(length: int = 10, batch_size: int = 2, world_size: int = 1, rank: int = 0, **options: Any) -> DeepSpeedDataLoader:
    return DeepSpeedDataLoader(
        Numbers(length),
        batch_size,
        pin_memory=True,
        local_rank=0,
        tput_timer=None,
        data_parallel_world_size=world_size,
        data_parallel_rank=rank,
        **options,
    )


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@given(length=st.integers(1, 23), batch_size=st.integers(1, 4), world_size=st.integers(1, 4), drop_last=st.booleans())
@settings(max_examples=30)
def test_micro_batches_equal_torchs_distributed_loader(
    length: int, batch_size: int, world_size: int, drop_last: bool
) -> None:
    for rank in range(world_size):
        ours = made(length, batch_size, world_size, rank, dataloader_drop_last=drop_last)
        sampler = DistributedSampler(Numbers(length), world_size, rank, shuffle=True, seed=0)
        theirs = DataLoader(Numbers(length), batch_size, sampler=sampler, drop_last=drop_last)
        for epoch in (0, 3):
            ours.set_epoch(epoch)
            sampler.set_epoch(epoch)
            assert batches(ours) == batches(theirs)
        assert len(ours) == len(theirs)


def test_each_pass_repeats_the_order_until_the_epoch_is_set() -> None:
    loader = made()
    first = batches(loader)
    assert batches(loader) == first
    loader.set_epoch(1)
    assert batches(loader) != first


def test_a_pass_that_was_left_early_is_not_continued_by_the_next() -> None:
    loader = made()
    first = next(iter(loader))
    assert next(iter(loader)).tolist() == first.tolist()


def test_the_place_moves_when_a_batch_is_handed_out() -> None:
    loader = made(length=10, batch_size=2, world_size=2)
    places = [loader.state_dict()["samples"]]
    places += [loader.state_dict()["samples"] for _ in loader]
    assert places == [0, 4, 8, 12]
    assert loader.state_dict() == {"epoch": 0, "samples": 0, "seed": 0, "length": 10}


@given(
    length=st.integers(1, 30),
    before=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    after=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    steps=st.integers(0, 6),
    epoch=st.integers(0, 2),
)
@settings(max_examples=40)
def test_resuming_reads_the_rest_of_the_same_order_at_any_world_size_and_micro_batch(
    length: int, before: tuple[int, int], after: tuple[int, int], steps: int, epoch: int
) -> None:
    def ranks(sizes: tuple[int, int]) -> list[DeepSpeedDataLoader]:
        return [made(length, sizes[1], sizes[0], rank) for rank in range(sizes[0])]

    whole = made(length, 1)
    whole.set_epoch(epoch)
    order = [i for batch in batches(whole) for i in batch]
    states = []
    for loader in ranks(before):
        loader.set_epoch(epoch)
        iterator = iter(loader)
        for _ in range(steps):
            if next(iterator, None) is None:
                break
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert all(state == states[0] for state in states)
    resumed = ranks(after)
    for loader in resumed:
        loader.load_state_dict(states[0])
        assert loader.state_dict() == states[0]
    rest = [[i for batch in batches(loader) for i in batch] for loader in resumed]
    left = order[states[0]["samples"] :]
    assert [i for group in zip(*rest, strict=True) for i in group][: len(left)] == left
    assert len(batches(resumed[0])) == len(resumed[0])  # the pass after it is whole again


def test_a_clients_sampler_is_taken_and_resumed_by_skipping() -> None:
    sampler = SequentialSampler(Numbers(7))
    loader = made(7, 2, data_sampler=sampler)
    assert loader.data_sampler is sampler
    iterator = iter(loader)
    next(iterator)
    resumed = made(7, 2, data_sampler=SequentialSampler(Numbers(7)))
    resumed.load_state_dict(loader.state_dict())
    assert batches(resumed) == [[2, 3], [4, 5], [6]]
    assert batches(resumed) == [[0, 1], [2, 3], [4, 5], [6]]
    assert len(resumed) == 4


@pytest.mark.parametrize("steps", [1, 3, 6, 7, 11, 12])
@pytest.mark.parametrize(
    "make_sampler",
    [
        lambda data, generator: RandomSampler(data),
        lambda data, generator: RandomSampler(data, generator=generator),
        lambda data, generator: RandomSampler(data, replacement=True, num_samples=12),
        lambda data, generator: SubsetRandomSampler(range(1, 13), generator=generator),
        lambda data, generator: WeightedRandomSampler([1.0] * 12, 12),
    ],
    ids=["shuffled", "shuffled by its own generator", "with replacement", "subset", "weighted"],
)
def test_a_sampler_that_draws_its_order_at_random_goes_on_in_the_same_order(make_sampler: Any, steps: int) -> None:
    """Over passes, with training drawing from the same generator between batches; six batches are one pass."""

    def drawing(loader: RepeatingLoader) -> list[list[int]]:
        torch.rand(3)
        return next(loader).tolist()  # type: ignore[no-any-return]

    def fresh(seed: int) -> RepeatingLoader:
        torch.manual_seed(seed)
        return RepeatingLoader(made(12, 2, data_sampler=make_sampler(Numbers(12), torch.Generator().manual_seed(4))))

    whole = fresh(1)
    for _ in range(steps):
        drawing(whole)
    place, of_rank, random_state = whole.state_dict(), whole.loader.rank_state_dict(), torch.get_rng_state()
    wanted = [drawing(whole) for _ in range(13)]
    resumed = fresh(2)
    resumed.load_state_dict(place)
    resumed.loader.load_rank_state_dict(of_rank)
    assert resumed.loader.rank_state_dict().keys() == of_rank.keys()  # saved at once, it would be the same
    torch.set_rng_state(random_state)
    assert [drawing(resumed) for _ in range(13)] == wanted


@given(
    length=st.integers(1, 30),
    before=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    after=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    steps=st.integers(1, 6),
    shuffle=st.booleans(),
)
@settings(max_examples=30)
def test_a_clients_distributed_sampler_reads_the_rest_at_any_world_size(
    length: int, before: tuple[int, int], after: tuple[int, int], steps: int, shuffle: bool
) -> None:
    def ranks(sizes: tuple[int, int]) -> list[DeepSpeedDataLoader]:
        world_size, batch_size = sizes
        samplers = [DistributedSampler(Numbers(length), world_size, rank, shuffle, seed=3) for rank in range(world_size)]
        return [made(length, batch_size, world_size, rank, data_sampler=s) for rank, s in enumerate(samplers)]

    order = list(DistributedSampler(Numbers(length), 1, 0, shuffle, seed=3))
    loaders = ranks(before)
    iterators = [iter(loader) for loader in loaders]
    for _ in range(min(steps, len(loaders[0]))):
        for iterator in iterators:
            next(iterator)
    place = loaders[0].state_dict()
    resumed = ranks(after)
    for loader in resumed:
        loader.load_state_dict(place)
    rest = [[i for batch in batches(loader) for i in batch] for loader in resumed]
    left = order[place["samples"] :]
    assert [i for group in zip(*rest, strict=True) for i in group][: len(left)] == left


def test_a_distributed_sampler_that_drops_the_rest_drops_it_after_a_resume_too() -> None:
    samplers = [DistributedSampler(Numbers(11), 2, rank, shuffle=False, drop_last=True) for rank in range(2)]
    resumed = [made(11, 1, 2, rank, data_sampler=sampler) for rank, sampler in enumerate(samplers)]
    for loader in resumed:
        loader.load_state_dict({"epoch": 0, "samples": 4, "seed": 0, "length": 11})
    assert [[i for batch in batches(loader) for i in batch] for loader in resumed] == [[4, 6, 8], [5, 7, 9]]


def test_a_place_that_unknown_orders_cannot_meet_is_read_again_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    loader_module.logger.addHandler(caplog.handler)
    resumed = made(8, 1, 3, 0, data_sampler=[10, 11, 12])
    resumed.load_state_dict({"epoch": 0, "samples": 4, "seed": 0, "length": 8})
    loader_module.logger.removeHandler(caplog.handler)
    assert "behind 4 samples, which 3 ranks cannot have read evenly" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_is_going_on_jumps_to_the_place_that_is_loaded(workers: int) -> None:
    """As after a rollback: the loop over the data, or its RepeatingLoader, lives on."""
    loader = made(num_local_io_workers=workers)
    order = batches(loader)
    iterator = iter(loader)
    next(iterator)
    place = loader.state_dict()
    assert [next(iterator).tolist() for _ in range(3)] == order[1:4]
    loader.load_state_dict(place)
    assert [batch.tolist() for batch in iterator] == order[1:]
    assert batches(loader) == order


def test_a_place_counts_in_its_own_epoch_only() -> None:
    place = {"epoch": 2, "samples": 4, "seed": 0, "length": 10}
    for set_epoch in ("loader", "sampler"):
        loader, whole = made(), made()
        loader.load_state_dict(place)
        (loader if set_epoch == "loader" else loader.data_sampler).set_epoch(3)
        whole.set_epoch(3)
        assert batches(loader) == batches(whole)
    loader.load_state_dict(place)
    loader.set_epoch(2)
    assert len(batches(loader)) == 3


def test_a_place_in_a_dataset_of_another_length_is_dropped_with_a_warning() -> None:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    loader_module.logger.addHandler(handler)
    loader = made(10)
    loader.load_state_dict({"epoch": 2, "samples": 4, "seed": 0, "length": 8})
    loader_module.logger.removeHandler(handler)
    assert loader.state_dict() == {"epoch": 2, "samples": 0, "seed": 0, "length": 10}
    assert "saved for 8 samples, but the dataset has 10: epoch 2 begins at its start" in seen[0]


def test_the_seed_is_part_of_the_place() -> None:
    loader = made()
    loader.load_state_dict({"epoch": 1, "samples": 0, "seed": 5, "length": 10})
    sampler = DistributedSampler(Numbers(10), 1, 0, seed=5)
    sampler.set_epoch(1)
    assert [i for batch in batches(loader) for i in batch] == list(sampler)


def test_a_pass_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    want = torch.rand(1)
    torch.manual_seed(0)
    batches(made())
    assert torch.equal(torch.rand(1), want)


def test_batches_are_collated_and_post_processed() -> None:
    loader = made(4, 2, data_sampler=SequentialSampler(Numbers(4)), collate_fn=sum)
    assert list(loader) == [1, 5]
    loader.post_process_func = lambda batch, place: (batch, place["samples"])
    assert list(loader) == [(1, 2), (5, 4)]


def test_worker_processes_give_the_same_batches() -> None:
    assert batches(made(9, 2, num_local_io_workers=2)) == batches(made(9, 2))


def test_the_timer_is_settled_of_each_pass() -> None:
    class Timer:
        passes = 0

        def update_epoch_count(self) -> None:
            self.passes += 1

    loader = made()
    loader.tput_timer = timer = Timer()
    batches(loader)
    batches(loader)
    assert timer.passes == 2


def test_without_a_process_group_one_rank_reads_everything() -> None:
    loader = DeepSpeedDataLoader(TensorDataset(torch.arange(6)), 2, False, 0, None)
    assert sorted(int(i) for (batch,) in loader for i in batch) == list(range(6))


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize("dataset", [Stream(), {1, 2}, 3])
def test_data_without_positions_is_refused_with_a_cure(dataset: Any) -> None:
    with pytest.raises(ValueError, match=r"no positions that ranks could share.*DataLoader of your own"):
        DeepSpeedDataLoader(dataset, 2, False, 0, None)


def test_senseless_sizes_and_unbuilt_curricula_are_refused() -> None:
    with pytest.raises(ValueError, match=r"batch_size=0, but at least 1"):
        made(batch_size=0)
    with pytest.raises(UnbuiltFeatureError, match="curriculum sampling is not built"):
        made(deepspeed_dataloader_config={"curriculum_learning": {}})
    assert len(made(deepspeed_dataloader_config={})) == 5


def test_repeating_gives_each_pass_in_the_order_of_its_epoch() -> None:
    repeating = RepeatingLoader(made())
    assert len(repeating) == 5
    assert iter(repeating) is repeating
    seen = [next(repeating).tolist() for _ in range(15)]
    for epoch in range(3):
        loader = made()
        loader.set_epoch(epoch)
        assert seen[5 * epoch : 5 * epoch + 5] == batches(loader)


@pytest.mark.parametrize("steps", [0, 2, 5, 7, 10])
def test_a_repeating_loader_resumes_where_it_stood(steps: int) -> None:
    whole, resumed = RepeatingLoader(made()), RepeatingLoader(made())
    for _ in range(steps):
        next(whole)
    next(resumed)
    resumed.load_state_dict(whole.state_dict())
    assert [next(resumed).tolist() for _ in range(8)] == [next(whole).tolist() for _ in range(8)]


def test_repeating_advances_the_sampler_of_a_torch_loader() -> None:
    sampler = DistributedSampler(Numbers(6), 1, 0)
    repeating = RepeatingLoader(DataLoader(Numbers(6), 6, sampler=sampler))
    assert [next(repeating).tolist() for _ in range(3)] != [next(repeating).tolist()] * 3
    assert sampler.epoch == 3


def test_repeating_any_sequence_works_and_nothing_is_an_error() -> None:
    repeating = RepeatingLoader([1, 2])
    assert [next(repeating) for _ in range(5)] == [1, 2, 1, 2, 1]
    with pytest.raises(UsageError, match=r"the list gave nothing in a whole pass"):
        next(RepeatingLoader([]))
    with pytest.raises(UsageError, match="drop_last"):
        next(RepeatingLoader(made(1, 2, dataloader_drop_last=True)))
