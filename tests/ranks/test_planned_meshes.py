"""What the plan says of ranks that share a model is what they take: at rest within 2 %, at the peak within 10 %.

The configurations are in `tests.support.planned_meshes`; DEEPSPEED_TEST_SWEEP=1 compares all of them, else two of each kind.
"""

from __future__ import annotations

import pytest

from tests.support.planned_meshes import PIPELINES, OfPipeline, compare
from tests.support.sweeps import IS_SWEEP

_AT_REST, _PEAK = 0.02, 0.10
_USUAL = 2


@pytest.mark.parametrize("setting", PIPELINES if IS_SWEEP else PIPELINES[:_USUAL], ids=lambda setting: setting.label)
def test_each_stage_of_a_pipeline_takes_what_was_planned(setting: OfPipeline) -> None:
    for stage in compare(setting):
        for bound, (planned, took) in ((_AT_REST, stage.states), (_PEAK, stage.peak)):
            assert abs(planned - took) <= bound * took, f"{stage.label}: {planned:,.0f} bytes planned, {took:,.0f} taken"
