"""Types of single values, as the blocks use them.

Lives here: whole numbers that may come as `5e8` or `"2"`, numbers that must be finite, choices in any case, dtype names.
Does not live here: checks that look at two keys. Called by the modules that define blocks.

Clients send integral floats (`0.9 * hidden * hidden`), numeric texts (from YAML, where `5e8` is a text) and torch dtypes;
`true` is never a number.
"""

from __future__ import annotations

import math
import operator
from pathlib import Path
from typing import Annotated, Any, Literal, SupportsIndex

from pydantic import BeforeValidator, Field

from deepspeed.config.faults import refuse

__all__ = [
    "Betas",
    "Cadence",
    "Dtype",
    "DtypeOrInt8",
    "FilePath",
    "Fraction",
    "Freeform",
    "LowerCase",
    "NonNegativeNumber",
    "NonNegativeWhole",
    "Number",
    "PerGroup",
    "Port",
    "PositiveNumber",
    "PositiveWhole",
    "RoundedDown",
    "TextList",
    "UpperCase",
    "Whole",
    "ZeroStage",
]


def _whole(value: object) -> object:
    """Turn what stands for a whole number into an int; leave the rest for pydantic to refuse."""
    if isinstance(value, bool):
        raise refuse("needed a whole number, not true or false")
    if isinstance(value, str):
        value = _from_text(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    return operator.index(value) if isinstance(value, SupportsIndex) else value


def _rounded_down(value: object) -> object:
    return math.floor(value) if isinstance(value, float) and math.isfinite(value) else value


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise refuse("needed a number, not true or false")
    return value


def _from_text(text: str) -> int | float | str:
    """Read `"2"` as int, `"5e8"` as float; give other texts back."""
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _cadence(value: object) -> object:
    """Infinity (Accelerate sends it) and 0 both mean never, which is None."""
    if isinstance(value, str):
        value = _from_text(value)
    is_never = value is not True and value is not False and value in (0, math.inf)
    return None if is_never else _whole(value) if value is not None else None


_DTYPES = {
    "fp16": ("fp16", "float16", "half"),
    "bf16": ("bf16", "bfloat16"),
    "fp32": ("fp32", "float32", "float"),
    "int8": ("int8",),
}
_DTYPE_OF = {spelling: name for name, spellings in _DTYPES.items() for spelling in spellings}


def _dtype(value: object) -> object:
    """Bring `torch.float16`, `"half"`, `"FP16"` ... to the short name; torch itself is not needed for that."""
    return _DTYPE_OF.get(str(value).lower().removeprefix("torch."), value)


def _per_group(value: object) -> object:
    """A number for all parameter groups, or a list with one number for each."""
    items = value if isinstance(value, (list, tuple)) else [value]
    if not items:
        raise refuse("needed a number, or a list with one number per parameter group", "Give at least one number.")
    numbers = [_finite(item) for item in items]
    return numbers if isinstance(value, (list, tuple)) else numbers[0]


def _finite(item: object) -> float:
    number = _from_text(item) if isinstance(item, str) else item
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
        raise refuse("needed a finite number, or a list with one number per parameter group")
    return float(number)


def _betas(value: object) -> object:
    """Two decay rates; a list becomes a tuple."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise refuse("needed a list of two numbers, each >= 0 and < 1", "The usual pair is [0.9, 0.999].")
    pair = tuple(_finite(item) for item in value)
    if not all(0.0 <= beta < 1.0 for beta in pair):
        raise refuse("needed a list of two numbers, each >= 0 and < 1", "The usual pair is [0.9, 0.999].")
    return pair


def _text_list(value: object) -> object:
    """One text is a list of one; repeated entries are dropped, the order stays."""
    items = [value] if isinstance(value, str) else value
    return (
        list(dict.fromkeys(items)) if isinstance(items, (list, tuple)) and all(isinstance(i, str) for i in items) else items
    )


def _no_empty_path(value: object) -> object:
    return None if value == "" else value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


LowerCase = BeforeValidator(_lower)
UpperCase = BeforeValidator(_upper)

Whole = Annotated[int, BeforeValidator(_whole)]
PositiveWhole = Annotated[int, Field(gt=0), BeforeValidator(_whole)]
ZeroStage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_whole)]
NonNegativeWhole = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
Port = Annotated[int, Field(ge=0, le=65535), BeforeValidator(_whole)]
RoundedDown = Annotated[int, Field(ge=0), BeforeValidator(_whole), BeforeValidator(_rounded_down)]
Cadence = Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(_cadence)]

Number = Annotated[float, BeforeValidator(_number)]
PositiveNumber = Annotated[float, Field(gt=0), BeforeValidator(_number)]
NonNegativeNumber = Annotated[float, Field(ge=0), BeforeValidator(_number)]
Fraction = Annotated[float, Field(ge=0, le=1), BeforeValidator(_number)]

Dtype = Annotated[Literal["fp16", "bf16", "fp32"], BeforeValidator(_dtype)]
DtypeOrInt8 = Annotated[Literal["fp16", "bf16", "fp32", "int8"], BeforeValidator(_dtype)]
PerGroup = Annotated[float | list[float], BeforeValidator(_per_group)]
Betas = Annotated[tuple[float, float], BeforeValidator(_betas)]
TextList = Annotated[list[str], BeforeValidator(_text_list)]
Freeform = dict[str, Any]
FilePath = Annotated[Path | None, BeforeValidator(_no_empty_path)]
