"""Training goes on with the sample after the last: inside an epoch and over epochs, on other ranks, in other micro-batches.

The reference is torch's DistributedSampler for one rank: its order is the global order of each epoch.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from deepspeed.data import RepeatingLoader
from deepspeed.engine.engine import DeepSpeedEngine
from tests.support.engines import config, make_engine, zero
from tests.support.models import Mlp, build
from tests.support.ranks import run_ranks

LENGTH = 26
Read = dict[int, list[int]]
"""Epoch -> numbers of the samples that one rank was given, in order."""


class Samples(Dataset[Any]):
    """Rows for an Mlp, each with its number."""

    def __init__(self) -> None:
        self._inputs, self._targets = build(Mlp).batch(LENGTH, 3)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, int]:
        return self._inputs[number], self._targets[number], number


class Scenario(NamedTuple):
    """How a run reads its data, and after how many micro-batches it is saved (seven are an epoch of two ranks)."""

    steps: int
    sampler: str = "own"
    workers: int = 0
    drops_last: bool = False
    repeats: bool = False


def _scenarios(sampler: str) -> list[Scenario]:
    """Inside the first epoch, at its very end, inside the second; plain and repeating, with workers, without the rest."""
    return [
        Scenario(3, sampler),
        Scenario(7, sampler, repeats=True),
        Scenario(7, sampler),
        Scenario(10, sampler, workers=1, repeats=True),
        Scenario(9, sampler, drops_last=True),
    ]


def _engine(scenario: Scenario, micro: int) -> DeepSpeedEngine:
    model = build(Mlp)
    settings = config(rows=micro, dataloader_drop_last=scenario.drops_last, **zero(1))
    engine = make_engine(model, settings, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), training_data=Samples())
    samplers = {
        "own": lambda: None,
        "distributed": lambda: DistributedSampler(Samples(), seed=0),
        "random": lambda: RandomSampler(Samples(), num_samples=13),
    }
    sampler = samplers[scenario.sampler]()  # type: ignore[no-untyped-call]
    if sampler is not None or scenario.workers:
        engine.training_dataloader = engine.deepspeed_io(
            Samples(), data_sampler=sampler, num_local_io_workers=scenario.workers
        )
    return engine


def _feed(engine: DeepSpeedEngine, scenario: Scenario) -> Iterator[tuple[int, Any]]:
    """Micro-batches with their epoch, from where the loader stands, without end."""
    loader = engine.training_dataloader
    assert loader is not None
    if scenario.repeats:
        for batch in RepeatingLoader(loader):
            yield loader.epoch, batch
    for epoch in count(loader.epoch):
        loader.set_epoch(epoch)
        for batch in loader:
            yield epoch, batch


def _train(engine: DeepSpeedEngine, batch: Any) -> list[int]:
    inputs, targets, numbers = batch
    torch.rand(1)  # as dropout would
    engine.backward(engine(inputs, targets))
    engine.step()
    return numbers.tolist()  # type: ignore[no-any-return]


def _read_on(engine: DeepSpeedEngine, feed: Iterator[tuple[int, Any]], scenario: Scenario) -> Read:
    """Train to the end of the third epoch, or for twelve micro-batches where the sampler counts no epochs."""
    read: Read = {}
    for number, (epoch, batch) in enumerate(feed):
        if number == 12 if scenario.sampler == "random" else epoch > 2:
            break
        read.setdefault(epoch, []).extend(_train(engine, batch))
    return read


def _let_workers_fork() -> None:
    """As in a rank that a launcher starts; a rank of a test would ask the test's forkserver, which serves the test alone."""
    multiprocessing.set_start_method("fork", force=True)


def _save(rank: int, world_size: int, folder: str, scenarios: list[Scenario]) -> list[tuple[Read, Read]]:
    """What this rank read before and after it saved."""
    _let_workers_fork()
    found = []
    for number, scenario in enumerate(scenarios):
        torch.manual_seed(20 + rank)
        engine = _engine(scenario, 2)
        feed = _feed(engine, scenario)
        before: Read = {}
        for _, (epoch, batch) in zip(range(scenario.steps), feed, strict=False):
            before.setdefault(epoch, []).extend(_train(engine, batch))
        engine.save_checkpoint(f"{folder}/{number}", tag="t")
        found.append((before, _read_on(engine, feed, scenario)))
        engine.destroy()
    return found


def _resume(rank: int, world_size: int, folder: str, scenarios: list[Scenario], micro: int) -> list[Read]:
    _let_workers_fork()
    found = []
    for number, scenario in enumerate(scenarios):
        torch.manual_seed(90)
        engine = _engine(scenario, micro)
        engine.load_checkpoint(f"{folder}/{number}", tag="t")
        found.append(_read_on(engine, _feed(engine, scenario), scenario))
        engine.destroy()
    return found


def _global_order(of_ranks: list[Read]) -> Read:
    """Ranks take samples of the global order in turn."""
    epochs = sorted(set(chain(*of_ranks)))
    return {e: [n for turn in zip(*(read[e] for read in of_ranks), strict=True) for n in turn] for e in epochs}


def _wanted(epoch: int) -> list[int]:
    sampler: DistributedSampler[Any] = DistributedSampler(Samples(), 1, 0, seed=0)
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize("sampler", ["own", "distributed"])
def test_any_number_of_ranks_reads_on_in_the_same_global_order(tmp_path: Path, sampler: str) -> None:
    scenarios = _scenarios(sampler)
    saved = run_ranks(_save, 2, str(tmp_path), scenarios, timeout_seconds=280)
    for world_size, micro in ((2, 2), (3, 1), (1, 3)):
        resumed = run_ranks(_resume, world_size, str(tmp_path), scenarios, micro, timeout_seconds=280)
        for number, scenario in enumerate(scenarios):
            before = _global_order([of_rank[number][0] for of_rank in saved])
            after = _global_order([of_rank[number] for of_rank in resumed])
            if (world_size, micro) == (2, 2):
                assert after == _global_order([of_rank[number][1] for of_rank in saved]), scenario
            assert max(after) == 2
            for epoch in range(3):
                read = before.get(epoch, []) + after.get(epoch, [])
                wanted = _wanted(epoch)
                lost = 0 if not scenario.drops_last else max(2 * 2, world_size * micro) - 1
                assert read[:LENGTH] == wanted[: len(read)], (scenario, world_size, epoch)
                assert len(read) >= LENGTH - lost, (scenario, world_size, epoch)


def test_a_clients_random_sampler_goes_on_in_the_same_order_on_each_rank(tmp_path: Path) -> None:
    """It draws each pass from the generator that training draws from, and every rank has its own."""
    scenarios = _scenarios("random")
    saved = run_ranks(_save, 2, str(tmp_path), scenarios, timeout_seconds=280)
    resumed = run_ranks(_resume, 2, str(tmp_path), scenarios, 2, timeout_seconds=280)
    for rank in range(2):
        for number, scenario in enumerate(scenarios):
            wanted, got = (list(chain(*read.values())) for read in (saved[rank][number][1], resumed[rank][number]))
            assert got == wanted, (rank, scenario)
    assert saved[0][0][1] != saved[1][0][1]


def _roll_back(rank: int, world_size: int, folder: str) -> None:
    """A loop over the data loads the checkpoint of some steps ago, as after a loss that exploded, and lives on."""
    for repeats, before, after in ((False, 2, 4), (True, 5, 6)):  # the second over the end of an epoch
        engine = _engine(Scenario(before, repeats=repeats), 2)
        feed = _feed(engine, Scenario(before, repeats=repeats))
        for _ in range(before):
            _train(engine, next(feed)[1])
        engine.save_checkpoint(folder, tag=f"{repeats}")
        wanted = [_train(engine, next(feed)[1]) for _ in range(after)]
        engine.load_checkpoint(folder, tag=f"{repeats}")
        assert [_train(engine, next(feed)[1]) for _ in range(after)] == wanted
        engine.destroy()


def test_a_loop_over_the_data_follows_a_roll_back(tmp_path: Path) -> None:
    run_ranks(_roll_back, 2, str(tmp_path))
