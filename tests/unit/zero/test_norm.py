"""The norm is exact, whatever the size, dtype and values."""

from __future__ import annotations

import math

import pytest
import torch

from deepspeed.zero.norm import sum_of_squares


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_it_equals_the_fp64_sum(dtype: torch.dtype) -> None:
    flats = [torch.randn(n).to(dtype) for n in (1, 1000, (1 << 19) + 7)]
    exact = sum(f.double().square().sum().item() for f in flats)
    # Rows of 1024 squares are summed in fp32 (6e-8 a rounding, of which pairwise sums keep about ten), rows in fp64.
    assert sum_of_squares(flats).item() == pytest.approx(exact, rel=1e-6 if dtype != torch.float64 else 1e-13)


def test_many_equal_values_do_not_lose_digits() -> None:
    values = torch.full((1 << 22,), 0.1)
    assert sum_of_squares([values]).item() == pytest.approx(values[0].double().item() ** 2 * values.numel(), rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_value_anywhere_shows(bad: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.zeros(1 << 20, dtype=dtype)
        values[777_777] = bad
        assert not math.isfinite(sum_of_squares([torch.ones(3), values]).item())


def test_nothing_has_norm_zero() -> None:
    assert sum_of_squares([]).item() == 0.0
    assert sum_of_squares([torch.zeros(0)]).item() == 0.0


def test_a_complex_number_counts_as_its_two_parts() -> None:
    flat = torch.randn(2000, dtype=torch.complex64)
    assert sum_of_squares([flat]).item() == pytest.approx(flat.abs().double().square().sum().item(), rel=1e-6)
