"""A run goes on at any ZeRO stage, on any number of ranks, in any precision, as if it had never stopped.

A case is (stage, ranks, precision) of the run that saves and of the run that goes on: six choices of four. All 4096 would
take hours, so 16 are taken (`covering_rows`) that hold every pair of values of any two choices: every stage to every stage,
every number of ranks to every other, every precision to every other, every stage with every precision, and so on. Only the
number of ranks that saved and the precision of the second run always go together. The sweep takes 64 that hold every triple.
Each run is also resumed as it was. One spawned world saves all runs of its number of ranks, one resumes all of its own.

The model has frozen, tied and dropped-out parts, buffers and a clipped gradient; AdamW follows a schedule; a step has
two micro-batches. What is shown:

    as it was       five losses, weights, moments, schedule, scale, counters, buffers, generators: equal to the last bit
    anywhere        what was loaded is what was saved, to the last bit of the narrower precision; then five losses and all
                    weights are the uninterrupted run's, as far as arithmetic goes (`_bounds`)
"""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.engine.engine import DeepSpeedEngine
from tests.support.engines import config, make_engine, masters, model_weights, moments, train, zero
from tests.support.models import TinyModel, build, make_batches
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference
from tests.support.sweeps import IS_SWEEP, covering_rows

ROWS = 12  # global rows of a micro-batch: 1, 2, 3 and 4 ranks divide it
BEFORE, AFTER = 3, 5
PEAK_RATE = 2e-3
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = tuple(DTYPES)


class Place(NamedTuple):
    """How a run is laid out."""

    stage: int
    ranks: int
    precision: str


class Case(NamedTuple):
    """A run that is saved in one place and goes on in another."""

    saved: Place
    resumed: Place

    @property
    def has_dropout(self) -> bool:
        """Masks are drawn per rank, so they are the same only on as many ranks."""
        return self.saved.ranks == self.resumed.ranks


def _case(row: tuple[int, ...]) -> Case:
    stage, ranks, precision, to_stage, to_ranks, to_precision = row
    return Case(Place(stage, 1 + ranks, PRECISIONS[precision]), Place(to_stage, 1 + to_ranks, PRECISIONS[to_precision]))


CASES = [_case(row) for row in covering_rows(strength=3 if IS_SWEEP else 2)]


class Everything(TinyModel):
    """A language model with all that a checkpoint must keep apart: tied, frozen, dropped-out; two kinds of buffers."""

    seen: Tensor
    gain: Tensor

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, width)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.dropout = nn.Dropout(0.2)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, self.VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("gain", torch.rand(width) + 0.5)

    def batch(self, rows: int, seed: int) -> tuple[Tensor, ...]:
        return (torch.randint(self.VOCABULARY, (rows, 5), generator=torch.Generator().manual_seed(seed)),)

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        hidden = self.embedding(tokens[:, :-1])
        hidden = self.dropout(hidden + torch.tanh(self.frozen(hidden))) * self.gain.to(hidden.dtype)
        logits = self.head(torch.tanh(self.mix(hidden))).flatten(0, 1)
        return F.cross_entropy(logits.float() if logits.dtype.itemsize == 2 else logits, tokens[:, 1:].flatten())


@dataclass
class State:
    """All that an engine holds, whole, as one rank sees it."""

    weights: dict[str, Tensor]
    model_weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    buffers: dict[str, Tensor]
    numbers: dict[str, Any]
    """Counters, learning rate, and what the random generators give next."""

    scale: float
    losses: list[float] = field(default_factory=list)


def _engine(place: Place, seed: int, *, has_dropout: bool) -> DeepSpeedEngine:
    model = build(Everything, dtype=torch.float64 if place.precision == "fp64" else torch.float32, seed=seed)
    model.dropout.p = 0.2 if has_dropout else 0.0
    blocks: dict[str, Any] = {
        "gradient_clipping": 0.3,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 12, "warmup_num_steps": 3, "warmup_max_lr": PEAK_RATE},
        },
        **zero(place.stage, reduce_bucket_size=50, stage3_param_persistence_threshold=10),
    }
    if place.precision in ("bf16", "fp16"):
        blocks[place.precision] = {"enabled": True}
    if place.precision == "fp16":
        blocks["fp16"] |= {"initial_scale_power": 8, "loss_scale_window": 3}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=PEAK_RATE, weight_decay=0.1)
    return make_engine(model, config(2, ROWS // place.ranks, **blocks), optimizer=optimizer)


def _train(engine: DeepSpeedEngine, rank: int, world_size: int, first: int, steps: int) -> list[float]:
    """Losses of this rank over some steps of the one sequence of global batches."""
    whole = make_batches(build(Everything), BEFORE + AFTER, 2, 1, rows=ROWS)[first : first + steps]
    split = [[[tuple(t.chunk(world_size)[r] for t in m[0]) for r in range(world_size)] for m in step] for step in whole]
    return train(engine, split, rank).losses


def _state(engine: DeepSpeedEngine, losses: list[float]) -> State:
    return State(
        masters(engine),
        model_weights(engine),
        {f"{name}.{key}": value for name, state in moments(engine).items() for key, value in state.items()},
        {name: buffer.clone() for name, buffer in engine.module.named_buffers()},
        {
            "steps": (engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps),
            "rate": engine.get_lr(),
            "draws": (torch.rand(2).tolist(), random.random(), float(np.random.rand())),
        },
        engine.loss_scale() if callable(engine.loss_scale) else engine.loss_scale,
        losses,
    )


def _save(rank: int, world_size: int, folder: str, cases: list[Case]) -> list[tuple[State, State]]:
    """What each run held when it was saved, and what five steps later."""
    states = []
    for number, case in enumerate(cases):
        torch.manual_seed(1000 * number + rank)
        random.seed(rank)
        np.random.seed(rank)
        engine = _engine(case.saved, 0, has_dropout=case.has_dropout)
        losses = _train(engine, rank, world_size, 0, BEFORE)
        engine.save_checkpoint(f"{folder}/{number}")
        at_save = _state(engine, losses)
        states.append((at_save, _state(engine, _train(engine, rank, world_size, BEFORE, AFTER))))
        engine.destroy()
    return states


def _resume(rank: int, world_size: int, folder: str, tasks: list[tuple[int, Place, bool]]) -> list[tuple[State, State]]:
    """Load each checkpoint into an engine that began elsewhere; what it then holds, and what five steps later."""
    states = []
    for number, place, has_dropout in tasks:
        torch.manual_seed(7)
        engine = _engine(place, 5, has_dropout=has_dropout)
        path, _ = engine.load_checkpoint(f"{folder}/{number}")
        assert path is not None
        at_load = _state(engine, [])
        states.append((at_load, _state(engine, _train(engine, rank, world_size, BEFORE, AFTER))))
        engine.destroy()
        gc.collect()
    return states


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_runs_go_on_anywhere(tmp_path: Path, ranks: int) -> None:
    cases = [case for case in CASES if case.saved.ranks == ranks]
    whole = run_ranks(_save, ranks, str(tmp_path), cases, timeout_seconds=600)
    faults = []
    for world_size in range(1, 5):
        tasks = [(n, case.resumed, case.has_dropout) for n, case in enumerate(cases) if case.resumed.ranks == world_size]
        if world_size == ranks:
            tasks += [(n, case.saved, case.has_dropout) for n, case in enumerate(cases)]
        resumed = run_ranks(_resume, world_size, str(tmp_path), tasks, timeout_seconds=600)
        for position, (number, place, _) in enumerate(tasks):
            saved = [of_rank[number] for of_rank in whole]
            got = [of_rank[position] for of_rank in resumed]
            case = Case(cases[number].saved, place)
            found = _differences_as_it_was(saved, got) if case.saved == place else _differences(case, saved, got)
            faults += [f"{case.saved} -> {place}: {fault}" for fault in found]
    assert not faults, "\n".join(faults)


def _differences_as_it_was(saved: list[tuple[State, State]], got: list[tuple[State, State]]) -> list[str]:
    """What is not equal to the last bit, on any rank, right after loading or five steps later."""
    found = []
    for rank, (of_saved, of_got) in enumerate(zip(saved, got, strict=True)):
        for when, wanted, state in zip(("loaded", "five steps later"), of_saved, of_got, strict=True):
            for what in ("weights", "model_weights", "moments", "buffers"):
                difference = relative_difference(getattr(state, what), getattr(wanted, what))
                if difference:
                    found.append(f"rank {rank}, {when}: {what} differ by {difference:.1e}")
            for name, one, other in (
                ("numbers", state.numbers, wanted.numbers),
                ("scale", state.scale, wanted.scale),
                ("losses", state.losses, wanted.losses if when != "loaded" else []),
            ):
                if one != other:
                    found.append(f"rank {rank}, {when}: {name} {one} instead of {other}")
    return found


def _differences(case: Case, saved: list[tuple[State, State]], got: list[tuple[State, State]]) -> list[str]:
    """What was not loaded as it was saved, and what strays from the uninterrupted run by more than its bound."""
    (at_save, wanted), (at_load, after) = saved[0], got[0]
    found = []
    for what in ("weights", "model_weights", "moments", "buffers"):
        before = getattr(at_load, what)
        # Weights of a 16-bit model are its masters' rounding; those of the others are the masters themselves.
        source = at_save.model_weights | at_save.weights if what == "model_weights" else getattr(at_save, what)
        narrowed = {name: value.to(before[name].dtype) for name, value in source.items() if name in before}
        difference = relative_difference(before, narrowed)
        if difference:
            found.append(f"{what} were loaded with a difference of {difference:.1e}")
    steps_and_rate = [{k: v for k, v in s.numbers.items() if k != "draws"} for s in (at_save, at_load, wanted, after)]
    if steps_and_rate[0] != steps_and_rate[1] or steps_and_rate[2] != steps_and_rate[3]:
        found.append(f"counters or rate: {steps_and_rate}")
    if case.saved.precision == case.resumed.precision and (at_load.scale, after.scale) != (at_save.scale, wanted.scale):
        found.append(f"loss scale {at_load.scale}, {after.scale} instead of {at_save.scale}, {wanted.scale}")
    of_losses, of_weights = _bounds(case)
    means = [
        [sum(per_rank) / len(states) for per_rank in zip(*(s[1].losses for s in states), strict=True)]
        for states in (got, saved)
    ]
    loss = max(abs(one - other) / other for one, other in zip(*means, strict=True))
    if not loss <= of_losses:
        found.append(f"losses differ by {loss:.1e}, more than {of_losses:.1e}")
    weights = relative_difference(after.weights, {n: v.to(after.weights[n].dtype) for n, v in wanted.weights.items()})
    if not weights <= of_weights:
        found.append(f"weights differ by {weights:.1e}, more than {of_weights:.1e}")
    return found


def _bounds(case: Case) -> tuple[float, float]:
    """How far losses and weights may be apart after five steps, relatively.

    fp64 on both sides, and fp32 where one side is: only orders of sums and single roundings differ. Where a side computes
    in 16 bits, with unit roundoff u: a loss is behind some twenty roundings (embedding, two linear layers, tanh, products),
    which add up to 20 u at most; and as AdamW moves a weight by no more than about its rate whatever the gradient, five
    steps in opposite directions take weights of size 1 apart by 2 x 5 x rate.
    """
    pair = {case.saved.precision, case.resumed.precision}
    if pair == {"fp64"}:
        return FP64_ROUNDING, FP64_ROUNDING
    if pair <= {"fp64", "fp32"}:
        return 1e-5, 1e-5
    roundoff = max(torch.finfo(DTYPES[precision]).eps / 2 for precision in pair)
    return 20 * roundoff, 2 * AFTER * PEAK_RATE


def test_the_cases_cover_what_this_file_says() -> None:
    for strength, repeated in ((2, {(1, 5)}), (3, set())):
        rows = covering_rows(strength=strength)
        assert len(rows) == len(set(rows)) == 4**strength
        for columns in combinations(range(6), strength):
            held = len({tuple(row[column] for column in columns) for row in rows})
            assert held == (4 if columns in repeated else 4**strength), columns
