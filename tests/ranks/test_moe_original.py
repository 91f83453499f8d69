"""Models with experts train as the original's, and go on from its checkpoints, at any ep_size and ZeRO stage."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from tests.support.engines import make_engine, masters
from tests.support.original_net import CLIENT_STATE, FIXTURES, MICRO_BATCHES, batch, settings, token_loss
from tests.support.ranks import run_ranks

VOCABULARY, WIDTH, RANKS = 17, 12, 2
PRECISION = {"moe-stage0-fp32": "fp32", "moe-stage2-bf16": "bf16"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # of the stored weights; masters have more digits
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}
"""As in `test_original_stages`: rounding in another order, enlarged by Adam where a gradient is small."""


class MoENet(nn.Module):
    """The model of the fixtures, at any `ep_size`."""

    def __init__(self, ep_size: int = 2) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.moe = MoE(WIDTH, expert, 4, ep_size, 1, capacity_factor=4.0, eval_capacity_factor=4.0, use_rts=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.emb(tokens)
        added, l_aux, _ = self.moe(hidden)
        loss = token_loss(self.head(hidden + added), targets)
        return loss + 0.01 * l_aux.to(loss.dtype)


def _fill(model: MoENet) -> MoENet:
    """As the fixtures began; the original counted each rank's experts from 0, so that ranks began with equal ones."""
    with torch.no_grad():
        for k, (_, param) in enumerate(sorted(model.named_parameters())):
            numbers = torch.arange(param.numel(), dtype=torch.float32)
            param.copy_((torch.sin(numbers * 0.37 + k) * 0.2).view_as(param) if param.dim() > 1 else torch.zeros(()))
    return model


def _engine(model: MoENet, stage: int, precision: str) -> Any:
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    return make_engine(model, settings(stage, precision), model_parameters=groups)


def _train(engine: Any, rank: int, steps: int) -> list[float]:
    losses = []
    for step in range(engine.global_steps, engine.global_steps + steps):
        for micro_batch in range(MICRO_BATCHES):
            loss = engine(*batch(step, micro_batch, rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def _begin(rank: int, world_size: int) -> dict[str, list[float]]:
    stages = {"moe-stage0-fp32": 0, "moe-stage2-bf16": 2}
    return {case: _train(_engine(_fill(MoENet()), stages[case], PRECISION[case]), rank, 3) for case in PRECISION}


def test_training_from_the_start_has_the_losses_of_the_original() -> None:
    found = run_ranks(_begin, RANKS)
    for case, precision in PRECISION.items():
        for of_rank, report in zip(found, json.loads((FIXTURES / case / "expected_training.json").read_text()), strict=True):
            assert of_rank[case] == pytest.approx(report["losses"], rel=TOLERANCE[precision])


RESUMED = {
    "moe-stage0-fp32": (
        [2.855530261993408, 2.8500988483428955, 2.8799870014190674, 2.8437585830688477],
        [2.8486669063568115, 2.8562772274017334, 2.8592417240142822, 2.8434574604034424],
    ),
    "moe-stage2-bf16": (
        [2.855503559112549, 2.850046396255493, 2.8801019191741943, 2.843756914138794],
        [2.848562002182007, 2.856367826461792, 2.8592770099639893, 2.8436012268066406],
    ),
}
"""Losses of the original's own resume, two steps of two micro-batches, by rank."""

PLACES = [(2, 0), (2, 1), (2, 2), (2, 3), (1, 0), (1, 3)]
"""(ep_size, ZeRO stage)."""


def _resume(rank: int, world_size: int) -> dict[tuple[str, int, int], tuple[dict[str, Tensor], list[float]]]:
    found = {}
    for case, (ep_size, stage) in itertools.product(PRECISION, PLACES):
        torch.manual_seed(1)
        engine = _engine(MoENet(ep_size), stage, PRECISION[case])
        path, client_state = engine.load_checkpoint(str(FIXTURES / case))
        assert path is not None
        assert client_state == CLIENT_STATE
        assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (3, 24, 6)
        loaded = {name: value.clone() for name, value in masters(engine).items()}
        found[case, ep_size, stage] = loaded, _train(engine, rank, 2)
    return found


def test_training_goes_on_as_the_original_s_own_resume_does() -> None:
    ranks = run_ranks(_resume, RANKS, timeout_seconds=120)
    for case, (ep_size, stage) in itertools.product(PRECISION, PLACES):
        stored = load_file(FIXTURES / case / "expected_weights.safetensors")
        seen = set()
        for of_rank, wanted in zip(ranks, RESUMED[case], strict=True):
            loaded, losses = of_rank[case, ep_size, stage]
            seen |= loaded.keys()
            for name, value in loaded.items():
                assert torch.equal(value.to(DTYPES[PRECISION[case]]), stored[name].to(DTYPES[PRECISION[case]])), (case, name)
            assert losses == pytest.approx(wanted, rel=TOLERANCE[PRECISION[case]]), (case, ep_size, stage)
        assert seen == stored.keys()


def _some_experts(rank: int, world_size: int) -> dict[str, Tensor]:
    model = MoENet()
    model.moe.set_deepspeed_parallelism()
    found: dict[str, Tensor] = {}
    DeepSpeedEngine.load_moe_state_dict(FIXTURES / "moe-stage0-fp32", "step3", found, False, model=model, num_experts=[4])
    return found


def test_experts_alone_are_added_to_a_state_dict() -> None:
    stored = load_file(FIXTURES / "moe-stage0-fp32" / "expected_weights.safetensors")
    found: dict[str, Tensor] = {"other": torch.zeros(1)}
    DeepSpeedEngine.load_moe_state_dict(FIXTURES / "moe-stage0-fp32", "step3", found, False)
    experts = {name for name in stored if "deepspeed_experts" in name}
    assert found.keys() == experts | {"other"}
    assert all(torch.equal(found[name], stored[name]) for name in experts)
    first, second = run_ranks(_some_experts, 2)
    assert first.keys() | second.keys() == experts
    assert not first.keys() & second.keys()
