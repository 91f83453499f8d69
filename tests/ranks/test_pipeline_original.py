"""Pipelines go on from checkpoints that the original's pipelines wrote, at any number of stages and ZeRO stage 0 or 1."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from deepspeed.pipe import LayerSpec, TiedLayerSpec
from tests.support.engines import masters
from tests.support.original_net import CLIENT_STATE, FIXTURES, MICRO_BATCHES, batch, settings
from tests.support.pipelines import make_pipeline
from tests.support.ranks import run_ranks

VOCABULARY, WIDTH = 17, 12
FIRST_STEP, MORE_STEPS = 3, 2
PRECISION = {"pipeline-fp32": "fp32", "pipeline-stage1-bf16": "bf16"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.n = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.n(torch.tanh(self.a(x)))
        return added


def _halve(x: Tensor) -> Tensor:
    return x * 0.5


def _unembed(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return x @ embedding.weight.t()


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().reshape(-1, VOCABULARY), labels.reshape(-1))


def _layers() -> list[Any]:
    tied = ("emb", nn.Embedding, VOCABULARY, WIDTH)
    return [TiedLayerSpec(*tied), *[LayerSpec(Block)] * 3, _halve, TiedLayerSpec(*tied, forward_fn=_unembed)]


def _resume(rank: int, world_size: int, case: str, zero_stage: int) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """What was loaded, and the losses and rates of the steps after it."""
    torch.manual_seed(1)
    engine = make_pipeline(_layers(), world_size, settings(zero_stage, PRECISION[case], 2), loss_fn=_loss)
    path, client_state = engine.load_checkpoint(str(FIXTURES / case))
    assert path is not None
    assert client_state == CLIENT_STATE
    assert engine.global_steps == FIRST_STEP
    loaded = {name: value.clone() for name, value in masters(engine).items()}
    losses, rates = [], []
    for step in range(FIRST_STEP, FIRST_STEP + MORE_STEPS):
        losses.append(engine.train_batch(iter([batch(step, micro, 0) for micro in range(MICRO_BATCHES)])).item())
        rates.append(engine.get_lr()[0])
    return loaded, losses, rates


def _layer_name(name: str) -> str:
    """As the fixture names what lies in its layer files."""
    layer, _, rest = name.removeprefix("tied_modules.").partition(".")
    return f"layer_00.{rest}" if layer == "emb" else f"layer_{int(layer):02d}.{rest}"


@pytest.mark.parametrize("case", list(PRECISION))
@pytest.mark.parametrize(("stages", "zero_stage"), [(1, 0), (2, 1), (3, 0)])
def test_training_goes_on_as_the_original_s_own_resume_does(case: str, stages: int, zero_stage: int) -> None:
    """Tolerances as in `test_original_stages`: rounding in another order, enlarged by Adam where a gradient is small."""
    is_fp32 = PRECISION[case] == "fp32"
    stored = load_file(FIXTURES / case / f"expected_{'layers' if is_fp32 else 'fp32'}.safetensors")
    report = json.loads((FIXTURES / case / "expected_resume.json").read_text())[0]
    tolerance = 1e-5 if is_fp32 else 1e-3
    seen = set()
    for loaded, losses, rates in run_ranks(_resume, stages, case, zero_stage):
        for name, value in loaded.items():
            stored_name = _layer_name(name) if is_fp32 else name
            seen.add(stored_name)
            assert torch.equal(value, stored[stored_name]), name
        assert losses == pytest.approx(report["losses"], rel=tolerance)
        assert rates == pytest.approx(report["lr_after_step"])
    assert seen == set(stored)
