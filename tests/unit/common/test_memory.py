from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.common.memory import format_nbytes

FACTOR = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4, "PiB": 1024**5}


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (-2 * 1024**3, "-2.00 GiB"),
        (1024**2 - 1, "1.00 MiB"),
        (3 * 1024**6, "3072.00 PiB"),
    ],
)
def test_known_amounts_read_as_expected(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


@given(st.integers(-(10**17), 10**17))
def test_the_text_names_the_amount_within_half_of_its_last_digit(nbytes: int) -> None:
    number, unit = format_nbytes(nbytes).split()
    assert abs(float(number) * FACTOR[unit] - nbytes) <= 0.00501 * FACTOR[unit]
    assert re.fullmatch(r"-?\d{1,4}(\.\d\d)?", number)
    assert abs(float(number)) < 1024
