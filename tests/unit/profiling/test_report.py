"""The profile as text, of numbers that are given."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from deepspeed.profiling.flops_profiler.report import full_report
from deepspeed.profiling.flops_profiler.summary import Row, StepFacts

ROW = Row("", "Linear", "", 0, -1, False, calls=1, params=8, macs=100, flops=200, backward_flops=400, seconds=0.5)
FACTS = StepFacts(
    micro_batches=1,
    samples=4,
    forward_seconds=0.5,
    backward_seconds=1.5,
    step_seconds=2.0,
    ranks=1,
    all_flops=600,
    all_again_flops=0,
    model_params=8,
)


def _text(**facts: float) -> str:
    profile = SimpleNamespace(
        recompute_fwd_factor=0.0,
        step_facts=dataclasses.replace(FACTS, **facts),  # type: ignore[arg-type]
        rows=lambda: [ROW],
        uncounted={},
        peak_flops=300.0,
    )
    return full_report(profile, 1, -1, 1, detailed=True)


def test_speed_is_of_the_passes_and_shares_of_the_whole_step() -> None:
    text = " ".join(_text().split())
    assert "FLOPs per second, forward + backward: 300.0 FLOPS" in text or "forward + backward: 300" in text
    assert "samples per second, all ranks: 1.00" in text
    assert "MFU: (forward + backward) / time / peak: 50.00%" in text


@pytest.mark.parametrize("step_seconds", [0.0, 2.0])
def test_passes_that_took_no_time_have_no_speed(step_seconds: float) -> None:
    """As on a stage without layers, or where all that was measured was counting."""
    text = _text(forward_seconds=0.0, backward_seconds=0.0, step_seconds=step_seconds)
    assert "FLOPs per second, forward + backward" not in text
    assert ("samples per second" in text) == (step_seconds > 0)
