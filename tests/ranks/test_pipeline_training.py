"""A pipeline trains as one process does: stages x data-parallel ranks x micro-batches x ties x clip x precision x schedule.

One launch per number of ranks runs every setting of that many. In the suite a selection in which every value of each choice
meets every value of each other where ranks allow; DEEPSPEED_TEST_SWEEP=1 runs them all. The reference is plain torch.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.engines import config, masters, zero
from tests.support.pipelines import Whole, layers, make_pipeline, token_batches, train_pipeline
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, train_reference
from tests.support.sweeps import IS_SWEEP

STEPS = 10
CLIP = 0.3
RATE = 0.05
PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
OPTIMIZER = functools.partial(torch.optim.SGD, lr=RATE, momentum=0.9)
MOST_RANKS = 8 if IS_SWEEP else 4


class Setting(NamedTuple):
    """One training."""

    stages: int
    data_ranks: int
    micro_batches: int
    is_tied: bool
    is_clipped: bool
    precision: str
    zero_stage: int
    schedule: str

    @property
    def ranks(self) -> int:
        return self.stages * self.data_ranks

    @property
    def chunks(self) -> int:
        return 2 if self.schedule == "interleaved" else 1

    @property
    def tolerance(self) -> float:
        """Most that masters may differ from the reference's, relative to the largest.

        fp64 and fp32: the order of sums differs, over ties and over ranks. bf16: gradients of ties are rounded in another
        order, and where the norm's last bit differs a weight may round to its neighbour; at most one last place of a
        gradient no larger than CLIP or 1, in each of the steps.
        """
        if self.precision == "bf16":
            return STEPS * RATE / (1 - 0.9) * torch.finfo(torch.bfloat16).eps
        return FP64_ROUNDING if self.precision == "fp64" else 1e-5


def _settings() -> list[Setting]:
    every = itertools.product(
        (1, 2, 3, 4), (1, 2), (1, 4, 8), (True, False), (True, False), PRECISIONS, (0, 1),
        ("1f1b", "gpipe", "zero_bubble", "interleaved"),
    )  # fmt: skip
    settings = [Setting(*values) for values in every]
    return settings if IS_SWEEP else _covering([each for each in settings if each.ranks <= MOST_RANKS])


def _covering(settings: list[Setting]) -> list[Setting]:
    """So few of `settings` that every two values that meet in one of them meet in one of the few."""

    def pairs(setting: Setting) -> set[tuple[Any, ...]]:
        return {(i, setting[i], j, setting[j]) for i, j in itertools.combinations(range(len(setting)), 2)}

    missing = set().union(*map(pairs, settings))
    chosen = []
    while missing:
        best = max(settings, key=lambda each: len(pairs(each) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


SETTINGS = _settings()


def _blocks(setting: Setting) -> dict[str, Any]:
    blocks: dict[str, Any] = {
        **zero(setting.zero_stage, reduce_bucket_size=100),
        "gradient_clipping": CLIP if setting.is_clipped else 0.0,
        "pipeline": {"schedule": setting.schedule},
    }
    if setting.precision == "bf16":
        blocks["bf16"] = {"enabled": True}
    return blocks


def _train(rank: int, world_size: int, numbers: list[int]) -> list[str]:
    """What is wrong, a line for each setting."""
    return [wrong for number in numbers for wrong in _compare(SETTINGS[number])]


def _compare(setting: Setting) -> list[str]:
    dtype = PRECISIONS[setting.precision]
    made = torch.float32 if setting.precision == "bf16" else dtype
    described = layers(4 * setting.chunks, tied=setting.is_tied, dtype=made)
    batches = token_batches(STEPS, setting.micro_batches, setting.data_ranks)
    reference = train_reference(
        Whole(described),
        OPTIMIZER,
        batches,
        clip=CLIP if setting.is_clipped else None,
        dtype=torch.bfloat16 if setting.precision == "bf16" else None,
    )
    engine = make_pipeline(
        described,
        setting.stages,
        config(setting.micro_batches, 2, **_blocks(setting)),
        optimizer=OPTIMIZER,
        num_chunks=setting.chunks,
    )
    losses = train_pipeline(engine, batches)
    got, want = masters(engine), reference.weights
    engine.destroy()
    wrong = []
    largest = max(float(value.abs().max()) for value in want.values())
    off = max((float((got[name].double() - want[name].double()).abs().max()) for name in got), default=0.0) / largest
    if not off <= setting.tolerance:
        wrong.append(f"{setting}: weights are off by {off:g}")
    loss_tolerance = setting.tolerance * max(map(abs, reference.losses))
    loss_off = max(abs(one - other) for one, other in zip(losses, reference.losses, strict=True))
    if not loss_off <= loss_tolerance:
        wrong.append(f"{setting}: losses are off by {loss_off:g}")
    return wrong


@pytest.mark.parametrize("ranks", sorted({setting.ranks for setting in SETTINGS}))
def test_a_pipeline_trains_as_one_process_does(ranks: int) -> None:
    numbers = [number for number, setting in enumerate(SETTINGS) if setting.ranks == ranks]
    for wrong in run_ranks(_train, ranks, numbers, timeout_seconds=3600 if IS_SWEEP else 120):
        assert wrong == []


def test_the_selection_has_every_value() -> None:
    for position, values in enumerate(zip(*SETTINGS, strict=True)):
        assert len(set(values)) == (4, 2, 3, 2, 2, 3, 2, 4)[position]
