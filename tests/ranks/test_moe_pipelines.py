"""Pipelines whose layers hold experts train as one process does, and their checkpoints hold the experts of all ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from deepspeed.moe.layer import MoE
from deepspeed.pipe.specs import LayerSpec
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.support.engines import config, masters, zero
from tests.support.models import TinyModel
from tests.support.moe_models import PLAIN, Expert, fill, place
from tests.support.pipelines import (
    WIDTH,
    Block,
    Embed,
    Head,
    Whole,
    make_pipeline,
    token_batches,
    token_loss,
    train_pipeline,
)
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference, train_reference
from tests.support.sweeps import IS_SWEEP

STEPS, BEFORE, MICRO_BATCHES, CLIP = 6, 3, 2, 0.3
OPTIMIZER = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
Carried = tuple[Tensor, Tensor]


class MoeBlock(nn.Module):
    """Experts around a residual; the load-balancing loss is carried along to the end."""

    def __init__(self, number: int, ep_size: int) -> None:
        super().__init__()
        self.moe = MoE(WIDTH, Expert(), num_experts=4, ep_size=ep_size, k=2, **PLAIN)
        place(self)
        fill(self, torch.float64)
        self.number = number

    def forward(self, carried: Tensor | Carried) -> Carried:
        hidden, losses = (carried, carried.new_zeros(())) if isinstance(carried, Tensor) else carried
        out, l_aux, _ = self.moe(torch.tanh(hidden))
        return hidden + out, losses + l_aux


class Last(Head):
    """The head, beside the losses."""

    def forward(self, carried: Any) -> Any:
        hidden, losses = carried
        return super().forward(hidden), losses


class Beside(Block):
    """A block without experts, beside the losses."""

    def forward(self, carried: Any) -> Any:
        hidden, losses = carried
        return super().forward(hidden), losses


def _loss(outputs: Carried, labels: Tensor) -> Tensor:
    logits, losses = outputs
    return token_loss(logits, labels) + 0.01 * losses


def _layers(ep_size: int, *, everywhere: bool) -> list[Any]:
    """Experts in the first half alone, or in both."""
    second = LayerSpec(MoeBlock, 1, ep_size) if everywhere else LayerSpec(Beside, 1, torch.float64)
    dtype = torch.float64
    return [LayerSpec(Embed, 90, dtype), LayerSpec(MoeBlock, 0, ep_size), second, LayerSpec(Last, 91, dtype)]


class Setting(NamedTuple):
    """One training."""

    ranks: int
    stages: int
    ep_size: int
    zero_stage: int
    everywhere: bool = True
    schedule: str = "1f1b"


SETTINGS = [
    Setting(2, 1, 2, 1),
    Setting(4, 2, 2, 0),
    Setting(4, 2, 2, 1, everywhere=False),
    Setting(4, 2, 2, 0, schedule="zero_bubble"),
    Setting(2, 2, 1, 1),
]
if IS_SWEEP:
    SETTINGS += [
        Setting(4, stages, ep_size, zero_stage, everywhere, schedule)
        for stages, ep_size in ((1, 2), (1, 4), (2, 2), (2, 1))
        for zero_stage in (0, 1)
        for everywhere in (True, False)
        for schedule in ("1f1b", "gpipe", "zero_bubble")
    ]


def _engine(setting: Setting) -> Any:
    blocks = zero(setting.zero_stage) | {"gradient_clipping": CLIP, "pipeline": {"schedule": setting.schedule}}
    described = _layers(setting.ep_size, everywhere=setting.everywhere)
    settings = config(MICRO_BATCHES, 2, **blocks)
    options = {"loss_fn": _loss, "optimizer": OPTIMIZER, "partition_method": "uniform"}
    return make_pipeline(described, setting.stages, settings, **options)


def _data(setting: Setting) -> list[Any]:
    return token_batches(STEPS, MICRO_BATCHES, setting.ranks // setting.stages)


def _train(rank: int, world_size: int, setting: Setting, folder: str) -> tuple[list[float], dict[str, Tensor], list[float]]:
    engine, data = _engine(setting), _data(setting)
    losses, norms = [], []
    for step in data[:BEFORE]:
        losses += train_pipeline(engine, [step])
        norms.append(engine.get_global_grad_norm())
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder, "weights.bin")
    return losses, masters(engine), norms


def _go_on(rank: int, world_size: int, setting: Setting, folder: str) -> dict[str, Tensor]:
    engine = _engine(setting)
    engine.load_checkpoint(folder)
    train_pipeline(engine, _data(setting)[BEFORE:])
    return masters(engine)


def _joined(of_ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    joined: dict[str, Tensor] = {}
    for of_rank in of_ranks:
        for name, value in of_rank.items():
            assert name not in joined or torch.equal(joined[name], value), name
            joined[name] = value
    return joined


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_pipeline_with_experts_trains_and_is_saved_as_one_model(tmp_path: Path, setting: Setting) -> None:
    folder = str(tmp_path)

    def reference(steps: int) -> Any:
        whole: TinyModel = Whole(_layers(1, everywhere=setting.everywhere), _loss)
        return train_reference(whole, OPTIMIZER, _data(setting)[:steps], clip=CLIP), whole

    want, whole = reference(BEFORE)
    losses, weights, norms = zip(*run_ranks(_train, setting.ranks, setting, folder), strict=True)
    assert relative_difference(_joined(list(weights)), want.weights) <= FP64_ROUNDING
    for of_rank in losses:
        assert of_rank == pytest.approx(want.losses, rel=1e-10)
    for of_rank in norms:
        assert of_rank == pytest.approx(want.norms, rel=1e-10)

    exported = get_fp32_state_dict_from_zero_checkpoint(folder)
    written = torch.load(tmp_path / "weights.bin", weights_only=True)
    for found in (exported, written):
        assert found.keys() == whole.state_dict().keys()
        assert relative_difference({name: found[name].double() for name in want.weights}, want.weights) <= 1e-7

    other = setting._replace(ep_size=1, stages=1, ranks=setting.ranks // setting.stages)  # the same batches
    got = _joined(run_ranks(_go_on, other.ranks, other, folder))
    assert relative_difference(got, reference(STEPS)[0].weights) <= FP64_ROUNDING
