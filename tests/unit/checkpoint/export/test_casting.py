from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.disk.container import bytes_of, dtype_of
from deepspeed.checkpoint.export.casting import CASTABLE, cast_bytes

PAIRS = list(itertools.product(CASTABLE, CASTABLE))
SPECIAL = [
    0.0,
    -0.0,
    float("inf"),
    float("-inf"),
    float("nan"),
    65504.0,
    65520.0,
    1e-8,
    6e-8,
    3.3895e38,
    3.4e38,
    1e-45,
    1.00390625,
]


def _cast(values: torch.Tensor, source: str, target: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(cast_bytes(bytes_of(values), source, target)), dtype=dtype_of(target, "t"))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_values_are_what_torch_makes_of_them(source: str, target: str) -> None:
    torch.manual_seed(0)
    anything = torch.randint(-(2**31), 2**31 - 1, (200_000,), dtype=torch.int32).view(torch.float32)
    values = torch.cat([torch.tensor(SPECIAL), anything]).to(dtype_of(source, "t"))
    torch.testing.assert_close(
        _cast(values, source, target), values.to(dtype_of(target, "t")), rtol=0, atol=0, equal_nan=True
    )


@given(bits=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20))
def test_every_fp32_value_rounds_to_the_bfloat16_of_torch(bits: list[Any]) -> None:
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    torch.testing.assert_close(_cast(values, "F32", "BF16"), values.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_equal_types_are_the_same_bytes_and_not_a_copy() -> None:
    data = memoryview(b"12345678")
    assert cast_bytes(data, "F32", "F32") is data
