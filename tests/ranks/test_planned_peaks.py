"""What the plan says of a run is what the run takes: at rest within 2 %, at its peak within 10 %, and on each tier.

The thirty configurations are in `tests.support.planned_runs`; DEEPSPEED_TEST_SWEEP=1 compares all of them, else each third.
"""

from __future__ import annotations

import pytest

from tests.support.planned_runs import SETTINGS, Setting, compare
from tests.support.sweeps import IS_SWEEP

_CHOSEN = SETTINGS if IS_SWEEP else SETTINGS[2::3]  # with fp16 among them
_AT_REST, _PEAK, _TIER = 0.02, 0.10, 0.02


@pytest.mark.parametrize("setting", _CHOSEN, ids=lambda setting: setting.label)
def test_a_run_takes_what_was_planned(setting: Setting) -> None:
    found = compare(setting)
    for bound, (planned, took) in (
        (_AT_REST, found.states),
        (_PEAK, found.peak),
        (_TIER, found.host),
        (_TIER, found.nvme),
    ):
        assert abs(planned - took) <= bound * took, f"{planned:,.0f} bytes planned, {took:,.0f} taken; {found.planned.terms}"


def test_the_settings_are_the_thirty_that_are_told_of() -> None:
    assert len(set(map(str, SETTINGS))) == len(SETTINGS) == 30
    assert {setting.stage for setting in SETTINGS} == {0, 1, 2, 3}
    assert {setting.precision for setting in _CHOSEN} == {"fp32", "bf16", "fp16"}
    assert {setting.model for setting in _CHOSEN} == {"gpt", "llama", "conv"}
