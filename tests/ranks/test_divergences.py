"""Twelve ways in which ranks part, each with the real engine and the limits as they are: every rank is told within 10 s.

An error names the call or module, the ranks, and where each stands. `places` says whether the ranks share memory, as on one
host, or only the back end, as between hosts; some ways of parting are no fault where memory is shared.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.comm import shared_memory
from deepspeed.errors import CommError
from tests.support.engines import config, make_engine, zero
from tests.support.ranks import RanksFailed, run_ranks

SECONDS = 10.0
ROWS = torch.ones(2, 8)


class Net(nn.Module):
    """Three layers; the last rank may be given them in another order, or of another width."""

    def __init__(self, width: int = 8, *, is_swapped: bool = False) -> None:
        super().__init__()
        layers = {"first": nn.Linear(8, width), "second": nn.Linear(width, 8)}
        for name in reversed(layers) if is_swapped else layers:
            self.add_module(name, layers[name])
        self.extra = nn.Linear(8, 8)

    def forward(self, x: Tensor, branches: int = 1) -> Tensor:
        for _ in range(branches):
            x = self.extra(x)
        return self.second(self.first(x)).square().mean()


class Case(NamedTuple):
    """One way to part."""

    act: Callable[[Any, bool, str], None] = lambda engine, is_odd, folder: None
    """What ranks do after three common steps; `is_odd` is true of the last rank. Three more common steps follow."""
    stage: int = 1
    is_spread: bool = False
    """Whether ranks lie on hosts of their own."""
    words: tuple[str, ...] = ()
    """What each error says."""
    model: Callable[[bool], Net] = lambda is_odd: Net()
    blocks: Callable[[bool], dict[str, Any]] = lambda is_odd: {}
    world_size: int = 2


def _step(engine: Any, branches: int = 1) -> None:
    engine.backward(engine(ROWS, branches))
    engine.step()


def _extra(engine: Any, is_odd: bool, folder: str) -> None:
    if is_odd:
        comm.all_reduce(torch.ones(3))


def _extra_of_torch(engine: Any, is_odd: bool, folder: str) -> None:
    if is_odd:
        dist.all_reduce(torch.ones(3))


def _skipped_branch(engine: Any, is_odd: bool, folder: str) -> None:
    _step(engine, branches=0 if is_odd else 1)


def _exception(engine: Any, is_odd: bool, folder: str) -> None:
    if is_odd:
        raise ValueError("bad sample 17")


def _killed(engine: Any, is_odd: bool, folder: str) -> None:
    if is_odd:
        os.kill(os.getpid(), signal.SIGKILL)


def _stopped(engine: Any, is_odd: bool, folder: str) -> None:
    if is_odd:
        os.kill(os.getpid(), signal.SIGSTOP)


def _first_stopped(engine: Any, is_odd: bool, folder: str) -> None:
    if not is_odd:
        os.kill(os.getpid(), signal.SIGSTOP)


def _ended_iterator(engine: Any, is_odd: bool, folder: str) -> None:
    for _ in range(2 if is_odd else 3):
        _step(engine)
    engine.save_checkpoint(folder)


def _shapes(engine: Any, is_odd: bool, folder: str) -> None:
    comm.all_reduce(torch.ones(5 if is_odd else 4))


def _order(engine: Any, is_odd: bool, folder: str) -> None:
    calls = [lambda: comm.all_reduce(torch.ones(4)), lambda: comm.broadcast(torch.ones(4), 0)]
    for call in reversed(calls) if is_odd else calls:
        call()


def _save_on_one(engine: Any, is_odd: bool, folder: str) -> None:
    if is_odd:
        engine.save_checkpoint(folder)


def _evaluation_on_one(engine: Any, is_odd: bool, folder: str) -> None:
    if is_odd:
        with torch.no_grad():
            engine(ROWS)


CASES = {
    "extra collective": Case(_extra, words=("all_reduce of 12 bytes", "gradient elements", "ranks [0, 1]")),
    "extra collective of three ranks": Case(_extra, 3, True, ("all_reduce of 12 bytes", "[0, 1, 2]"), world_size=3),
    "extra collective called through torch": Case(_extra_of_torch, words=("torch.distributed.all_reduce", "gradient el")),
    "skipped branch": Case(_skipped_branch, 3, True, ("extra", "ranks [0, 1]")),
    "exception on one rank": Case(_exception, words=("gradient elements", "rank 1")),
    "killed rank": Case(_killed, words=("gradient elements", "rank 1")),
    "killed rank of another host": Case(_killed, 3, True, ("ranks [0, 1]",)),
    "stopped rank": Case(_stopped, words=("rank 1 (process", "stopped by a signal", "gradient elements")),
    "stopped rank that serves the store": Case(_first_stopped, 3, words=("rank 0 (process", "stopped by a signal")),
    "ended iterator": Case(_ended_iterator, words=("gradient elements", "all_gather", "step 6")),
    "different shapes": Case(_shapes, words=("all_reduce of 16 bytes", "all_reduce of 20 bytes")),
    "different order": Case(_order, words=("all_reduce of 16 bytes", "broadcast of 16 bytes")),
    "save on one rank": Case(_save_on_one, words=("gradient elements", "all_gather")),
    "evaluation on one rank": Case(_evaluation_on_one, 3, True, ("ranks [0, 1]", "first")),
    "different config": Case(blocks=lambda odd: zero(2 if odd else 1), words=("zero_optimization.stage: 2", "rank 0 has")),
    "different modules": Case(model=lambda odd: Net(9 if odd else 8), words=("'first.weight', shape (9, 8)", "[1]")),
    "different module order": Case(model=lambda odd: Net(is_swapped=odd), words=("'first.weight'", "'second.weight'")),
}


def _run(rank: int, world_size: int, name: str, folder: str) -> tuple[str, float]:
    case = CASES[name]
    if case.is_spread:
        shared_memory.host_identity = lambda: f"host of rank {rank}"
    is_odd = rank == world_size - 1
    torch.manual_seed(0)
    comm.init_distributed("gloo", verbose=False)
    began = time.monotonic()
    try:
        blocks = {**zero(case.stage, stage3_param_persistence_threshold=0), **case.blocks(is_odd)}
        model = case.model(is_odd)
        engine = make_engine(model, config(rows=2, **blocks), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            _step(engine)
        began = time.monotonic()
        case.act(engine, is_odd, folder)
        for _ in range(3):
            _step(engine)
    except (CommError, RuntimeError) as error:  # torch's own call ends with torch's own error
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


class Outcome(NamedTuple):
    """What the ranks that could still say something said, and how long each took; what the others were found to be."""

    texts: list[str]
    seconds: list[float]
    lost: str


def _outcome(name: str, folder: str) -> Outcome:
    """Run a case; a rank that is dead or stopped makes `run_ranks` fail, and then the others' results are in the echo."""
    try:
        results = run_ranks(_raised_or_returned, CASES[name].world_size, name, folder, init=False, timeout_seconds=40)
    except RanksFailed as failed:
        print(failed)
        told = [(failure.kind, re.search(r"Told: ([\d.]+) (.*)", failure.text, re.DOTALL)) for failure in failed.failures]
        found = [match for _, match in told if match is not None]
        lost = "".join(kind for kind, match in told if match is None)
        return Outcome([match[2] for match in found], [float(match[1]) for match in found], lost)
    return Outcome([text for text, _ in results], [seconds for _, seconds in results], "")


class Told(Exception):
    """Carries a rank's error out of a run that other ranks do not survive."""


def _raised_or_returned(rank: int, world_size: int, name: str, folder: str) -> tuple[str, float]:
    text, seconds = _run(rank, world_size, name, folder)
    if name.startswith(("exception", "killed", "stopped")):
        raise Told(f"Told: {seconds} {text}")
    return text, seconds


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Outcome]]:
    """All cases, three at a time: they wait most of the time."""
    with ThreadPoolExecutor(3) as pool:
        return {name: pool.submit(_outcome, name, str(tmp_path_factory.mktemp("case"))) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_is_settled(name: str, outcomes: dict[str, Future[Outcome]]) -> None:
    case, outcome = CASES[name], outcomes[name].result()
    lost = 1 if name.startswith(("exception", "killed", "stopped")) else 0
    assert len(outcome.texts) == case.world_size - lost, outcome
    assert outcome.lost == {"exception": "raised", "killed": "died", "stopped": "hung"}.get(name.split(maxsplit=1)[0], "")
    for text in outcome.texts:
        if "torch" in name and "deepspeed" not in text and "rank" not in text:
            continue  # the rank inside torch's call: gloo's error; the verdict is in its log
        for word in case.words:
            assert word in text, text
    assert max(outcome.seconds) < SECONDS, outcome
