"""What the plan says of ranks that share a model is what they take: at rest within 2 %, at the peak within 10 %.

The configurations are in `tests.support.planned_meshes`; DEEPSPEED_TEST_SWEEP=1 compares all of them, else two pipelines and
one of each other kind: MoE layers, stacked experts, tensor ranks, sequence ranks.
"""

from __future__ import annotations

import pytest

from tests.support.planned_meshes import MODELS, PIPELINES, OfModel, OfPipeline, compare
from tests.support.sweeps import IS_SWEEP

_AT_REST, _PEAK = 0.02, 0.10


@pytest.mark.parametrize("setting", PIPELINES if IS_SWEEP else PIPELINES[:2], ids=lambda setting: setting.label)
def test_each_stage_of_a_pipeline_takes_what_was_planned(setting: OfPipeline) -> None:
    _require_as_planned(setting)


@pytest.mark.parametrize("setting", MODELS if IS_SWEEP else MODELS[:4], ids=lambda setting: setting.label)
def test_ranks_that_share_a_model_take_what_was_planned(setting: OfModel) -> None:
    _require_as_planned(setting)


def _require_as_planned(setting: OfPipeline | OfModel) -> None:
    for rank in compare(setting):
        for bound, (planned, took) in ((_AT_REST, rank.states), (_PEAK, rank.peak)):
            assert abs(planned - took) <= bound * took, f"{rank.label}: {planned:,.0f} bytes planned, {took:,.0f} taken"
