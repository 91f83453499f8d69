"""Engines over tensor-parallel ranks go on from what the original's AutoTP wrote, over as many ranks and over others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import nn

from tests.support.engines import make_engine
from tests.support.original_net import FIXTURES, MICRO_BATCHES, ColumnAndRow, batch, settings
from tests.support.ranks import run_ranks

FIRST_STEP, MORE_STEPS = 3, 2
RULES = [
    {"patterns": [r".*up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*down\.weight$"], "partition_type": "row"},
]


def _engine(model: nn.Module, size: int, stage: int, precision: str) -> Any:
    blocks: dict[str, Any] = {}
    if size > 1:
        blocks["tensor_parallel"] = {
            "autotp_size": size,
            "partition_config": {"use_default_specs": False, "layer_specs": RULES},
        }
    return make_engine(model, settings(stage, precision, **blocks))


def _resume(rank: int, world_size: int, case: str, stages: list[int]) -> dict[int, list[float]]:
    found = {}
    for stage in stages:
        engine = _engine(ColumnAndRow(), world_size, stage, case.rsplit("-", 1)[1])
        engine.load_checkpoint(str(FIXTURES / case))
        losses = []
        for step in range(FIRST_STEP, FIRST_STEP + MORE_STEPS):
            for micro_batch in range(MICRO_BATCHES):
                loss = engine(*batch(step, micro_batch, 0))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        found[stage] = losses
        engine.destroy()
    return found


@pytest.mark.parametrize(("world_size", "stages"), [(2, [0, 1, 3]), (4, [1]), (1, [0])])
@pytest.mark.parametrize(("case", "tolerance"), [("tp2-stage0-fp32", 1e-5), ("tp2-stage1-bf16", 4e-3)])
def test_training_goes_on_as_the_originals_own_resume_does(
    case: str, tolerance: float, world_size: int, stages: list[int]
) -> None:
    """Tolerances: fp32, other orders of sums in products, enlarged by Adam: 1e-5. bf16 rounds to 8 bits: 2**-8 = 4e-3."""
    report = json.loads((FIXTURES / case / "expected_resume.json").read_text())
    for found in run_ranks(_resume, world_size, case, stages):
        for stage in stages:
            assert found[stage] == pytest.approx(report[0]["losses"], rel=tolerance), stage
