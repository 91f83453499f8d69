"""Decoders of Hugging Face's library with their experts spread over ranks train as one plain process does."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.engine.engine import DeepSpeedEngine
from tests.support.engines import Outcome, config, make_engine, train, zero
from tests.support.models import make_batches
from tests.support.moe_decoders import moe_decoder
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, Reference, relative_difference, train_reference
from tests.support.sweeps import IS_SWEEP

STEPS = 4
ROWS = 3
CLIP = 0.05
FP32_PARTS = 1e-5
"""Routers of DeepSeek compute in fp32, rounding at 6e-8 in an order that depends on the rows; Adam divides by sqrt(v)."""


@dataclass(frozen=True)
class Case:
    """One training."""

    kind: str
    ep_size: int
    stage: int
    accumulation: int = 1
    is_clipped: bool = False

    @property
    def tolerance(self) -> float:
        return FP32_PARTS if self.kind.startswith("deepseek") else FP64_ROUNDING

    def batches(self, world_size: int) -> Any:
        return make_batches(moe_decoder(self.kind), STEPS, self.accumulation, world_size, ROWS)

    def settings(self) -> dict[str, Any]:
        keys: dict[str, Any] = {"stage3_param_persistence_threshold": 50} if self.stage == 3 else {}
        blocks = zero(self.stage, reduce_bucket_size=700, **keys) | {"gradient_clipping": CLIP if self.is_clipped else 0.0}
        return config(self.accumulation, ROWS, expert_parallel=auto_ep(self.ep_size), **blocks)


CASES = {
    1: [Case("mixtral", 1, 3)],
    2: [
        *(Case("mixtral", 2, stage, 1 + stage % 2, stage > 1) for stage in range(4)),
        *(Case("qwen2_moe", 1, 3), Case("qwen3_moe", 2, 2), Case("deepseek_v3", 2, 1, 2), Case("deepseek_v2", 2, 3)),
    ],
    4: [
        *(Case("mixtral", 2, 1, 2, True), Case("qwen2_moe", 2, 3), Case("qwen3_moe", 4, 0), Case("mixtral", 4, 3, 2, True)),
        *([Case("qwen3_moe", 2, stage) for stage in range(4)] if IS_SWEEP else []),
    ],
}


def auto_ep(size: int) -> dict[str, Any]:
    """The block of a config."""
    return {"enabled": True, "autoep_size": size}


def _optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def _engine(kind: str, settings: dict[str, Any]) -> DeepSpeedEngine:
    model = moe_decoder(kind)
    return make_engine(model, settings, optimizer=_optimizer(model.parameters()))


@dataclass
class Trained:
    """What a rank brings back; references are spread over the ranks."""

    outcomes: dict[Case, Outcome] = field(default_factory=dict)
    references: dict[Case, Reference] = field(default_factory=dict)


def _train_all(rank: int, world_size: int) -> Trained:
    trained = Trained()
    turns = itertools.cycle(range(world_size))
    for case in CASES[world_size]:
        batches = case.batches(world_size)
        engine = _engine(case.kind, case.settings())
        trained.outcomes[case] = train(engine, batches, rank)
        engine.destroy()
        if next(turns) == rank:
            trained.references[case] = train_reference(
                moe_decoder(case.kind),
                _optimizer,
                batches,
                clip=CLIP if case.is_clipped else None,
                unused_counts_as_zero=True,
            )
    return trained


def _joined(of_ranks: list[dict[str, Tensor]], ep_size: int) -> dict[str, Tensor]:
    """Stacked experts one behind the other; ranks that hold the same must hold the same bits."""
    joined = {}
    for name in of_ranks[0]:
        held = [of_rank[name] for of_rank in of_ranks]
        period = ep_size if ".mlp.experts." in name else 1
        for rank, value in enumerate(held):
            assert torch.equal(value, held[rank % period]), (name, rank)
        joined[name] = torch.cat(held[:period])
    return joined


@pytest.mark.parametrize("world_size", CASES)
def test_spread_decoders_train_as_in_one_process(world_size: int) -> None:
    ranks = run_ranks(_train_all, world_size, timeout_seconds=170)
    references = {case: reference for each in ranks for case, reference in each.references.items()}
    faults = []
    for case in CASES[world_size]:
        outcomes = [each.outcomes[case] for each in ranks]
        wanted = references[case]
        losses = torch.tensor([each.losses for each in outcomes], dtype=torch.float64).mean(0)
        losses = losses.view(STEPS, case.accumulation).mean(1)
        off = {
            "weights": relative_difference(_joined([each.weights for each in outcomes], case.ep_size), wanted.weights),
            "norms": max(abs(g - w) / abs(w) for g, w in zip(outcomes[0].norms, wanted.norms, strict=True)),
            "losses": (losses - torch.tensor(wanted.losses, dtype=torch.float64)).abs().max().item(),
        }
        faults += [f"{case}: {name} off by {far:.2g}" for name, far in off.items() if not far <= case.tolerance]
        assert len({tuple(each.norms) for each in outcomes}) == 1
        if case.is_clipped:
            assert min(wanted.norms) > CLIP
    assert faults == []
