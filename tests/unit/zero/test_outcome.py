"""The judgement on an update: what the host reads, and what stays on the device."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepspeed.zero.outcome import REQUESTED, Outcome


class SlowNumber:
    """A number that is not there until somebody waits for it."""

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self.is_waited_for = False

    def is_ready(self) -> bool:
        return self.is_waited_for

    def get(self) -> float:
        self.is_waited_for = True
        return float(self._value)


def _outcome(squares: float, base: float = 0.5, clip: float = 0.0, *, is_norm: bool = True, skips: bool = True) -> Outcome:
    total = torch.tensor(squares, dtype=torch.float64)
    return Outcome(total, base, clip=clip, is_norm=is_norm, skips_nonfinite=skips, read=SlowNumber)


def test_the_norm_is_in_the_units_of_the_mean_loss() -> None:
    assert _outcome(16.0, base=0.5).norm == 2.0


@pytest.mark.parametrize(("clip", "expected"), [(0.0, 0.5), (1.0, 0.5 * 1.0 / (2.0 + 1e-6)), (10.0, 0.5)])
def test_host_and_device_agree_on_the_factor(clip: float, expected: float) -> None:
    outcome = _outcome(16.0, clip=clip)
    assert float(outcome.factor_on_device()) == pytest.approx(expected, rel=1e-6)
    assert not outcome.is_known()  # what stays on the device waits for nothing
    assert outcome.factor() == pytest.approx(expected)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_non_finite_sum_skips_on_both_sides(bad: float) -> None:
    outcome = _outcome(bad)
    flag = outcome.skip_on_device()
    assert flag is not None
    assert flag.item() == 1.0
    assert not outcome.is_known()
    assert outcome.has_overflow


def test_where_nothing_is_skipped_a_non_finite_sum_is_no_overflow() -> None:
    outcome = _outcome(math.nan, skips=False)
    assert outcome.skip_on_device() is None
    assert not outcome.has_overflow


def test_without_a_norm_there_is_nothing_to_clip_by() -> None:
    outcome = _outcome(16.0, clip=1.0, is_norm=False)
    assert outcome.norm is None
    assert outcome.factor() == outcome.factor_on_device() == 0.5
    assert not outcome.has_overflow


@pytest.mark.parametrize("skips", [True, False])
def test_a_skip_that_a_client_asked_for_is_told_from_one_of_gradients(skips: bool) -> None:
    asked = _outcome(REQUESTED, skips=skips)
    assert asked.is_requested
    assert asked.has_overflow
    assert asked.norm is None
    for both in (REQUESTED + math.inf, REQUESTED + math.nan, math.inf, 16.0):
        outcome = _outcome(both, skips=skips)
        assert not outcome.is_requested
        assert outcome.has_overflow is (skips and not math.isfinite(both))


def test_a_rank_that_did_not_ask_skips_on_its_device_as_well() -> None:
    flag = _outcome(REQUESTED).skip_on_device()
    assert flag is not None
    assert flag.item() == 1.0
