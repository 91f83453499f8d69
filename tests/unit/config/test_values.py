"""Types of single values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from deepspeed.config import values


def read(kind: Any, value: object) -> Any:
    return TypeAdapter(kind).validate_python(value)


@given(st.integers(-(2**53), 2**53))
def test_a_whole_number_may_come_as_number_or_text(number: int) -> None:
    for form in (number, float(number), str(number), f"{float(number)}", np.int64(number)):
        assert read(values.Whole, form) == number
        assert type(read(values.Whole, form)) is int


def test_scientific_notation_is_a_whole_number() -> None:
    assert read(values.Whole, 5e8) == read(values.Whole, "5e8") == 500_000_000


@pytest.mark.parametrize("value", [2.5, "2.5", "x", True, False, None, math.nan, math.inf, [1], "nan", "inf"])
def test_other_values_are_no_whole_number(value: object) -> None:
    with pytest.raises(ValidationError):
        read(values.Whole, value)


@pytest.mark.parametrize("value", [True, "x", None, [1.0]])
def test_other_values_are_no_number(value: object) -> None:
    with pytest.raises(ValidationError):
        read(values.Number, value)


@pytest.mark.parametrize("value", [math.inf, "inf", "Infinity", 0, "0", None, 0.0])
def test_a_cadence_can_be_never(value: object) -> None:
    assert read(values.Cadence, value) is None


@pytest.mark.parametrize("value", [-1, 2.5, True, False, math.nan, -math.inf, "often"])
def test_a_senseless_cadence_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        read(values.Cadence, value)


@pytest.mark.parametrize(
    ("value", "name"),
    [("half", "fp16"), ("torch.bfloat16", "bf16"), ("FLOAT32", "fp32"), ("float", "fp32"), ("fp16", "fp16")],
)
def test_dtypes_have_one_name(value: str, name: str) -> None:
    assert read(values.Dtype, value) == name


def test_an_object_that_prints_as_a_dtype_is_one() -> None:
    class Printed:
        def __str__(self) -> str:
            return "torch.float16"

    assert read(values.Dtype, Printed()) == "fp16"


@pytest.mark.parametrize("value", [0.1, 1, "1e-3", [0.1, 1], (0.1,)])
def test_a_rate_is_a_number_or_one_per_group(value: object) -> None:
    found = read(values.PerGroup, value)
    assert found == ([float(v) for v in value] if isinstance(value, (list, tuple)) else float(value))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [[], "x", [True], math.nan, [math.inf], {"a": 1}])
def test_other_values_are_no_rate(value: object) -> None:
    with pytest.raises(ValidationError):
        read(values.PerGroup, value)


@pytest.mark.parametrize("value", [[0.9], [0.9, 1.0], [-0.1, 0.9], "0.9", [0.9, None]])
def test_other_values_are_no_betas(value: object) -> None:
    with pytest.raises(ValidationError):
        read(values.Betas, value)


def test_lists_of_texts_drop_repeats_and_keep_the_order() -> None:
    assert read(values.TextList, ["b", "a", "b"]) == ["b", "a"]
    assert read(values.TextList, "b") == ["b"]


def test_an_empty_path_is_none() -> None:
    assert read(values.FilePath, "") is None
