"""Two checkpoints, tensor by tensor: which differ, by how much, and which are equal to the last bit.

A parameter's value is its fp32 master copy where there is one, else the weight; so a checkpoint of 16-bit training compares
with one of fp32 training, and files of different layouts with each other. Values are read in blocks.

Lives here: the arithmetic and the names. Does not live here: other state (`state_diff`), tables (`diff`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from deepspeed.checkpoint.disk import names
from deepspeed.checkpoint.source import CheckpointSource
from deepspeed.checkpoint.tools.output import dtype_text

__all__ = ["WEIGHT", "TensorDifference", "compare_tensors", "difference_of", "values_of"]

WEIGHT = "weight"
"""What a parameter's own value is called; the optimizer's entries are called by their keys."""

_BLOCK_NUMEL = 1 << 18
_NUMBER = "number"

Verdict = Literal["equal", "within tolerance", "values", "dtype", "shape", "only in A", "only in B"]


@dataclass(frozen=True)
class TensorDifference:
    """One parameter's value, or one entry of its optimizer state, in A and B; None where a side lacks it."""

    name: str
    what: str
    verdict: Verdict
    shape_a: tuple[int, ...] | None
    shape_b: tuple[int, ...] | None
    dtype_a: str | None
    dtype_b: str | None
    largest_abs: float | None = None
    """Largest absolute difference of two elements; NaN where one of them is NaN."""

    relative: float | None = None
    """That difference divided by the largest absolute value in A."""

    different_numel: int = 0
    """Elements that are not equal to the last bit (or, of different dtypes, not equal)."""

    @property
    def is_difference(self) -> bool:
        """Whether A and B do not agree here."""
        return self.verdict not in ("equal", "within tolerance")


class Values(NamedTuple):
    """Something to compare: a tensor on the disk, or a plain number."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], Tensor]
    """`read(start, length)` gives flat elements on the CPU."""


def compare_tensors(
    a: CheckpointSource, b: CheckpointSource, *, atol: float = 0.0, rtol: float = 0.0
) -> Iterator[TensorDifference]:
    """Compare all weights, buffers and optimizer entries, in the order of their names.

    Args:
        a: the first.
        b: the second.
        atol: absolute difference that is allowed.
        rtol: allowed difference, as a part of the largest absolute value in A.
    """
    in_a, in_b = values_of(a), values_of(b)
    _add_tied(in_a, in_b, a.state["shared_parameters"])
    _add_tied(in_b, in_a, b.state["shared_parameters"])
    for name, what in sorted(in_a.keys() | in_b.keys(), key=lambda key: (key[0], key[1] != WEIGHT, key[1])):
        yield difference_of(name, what, in_a.get((name, what)), in_b.get((name, what)), atol=atol, rtol=rtol)


def values_of(source: CheckpointSource) -> dict[tuple[str, str], Values]:
    """(parameter or buffer, `WEIGHT` or state key) -> its values."""
    found: dict[tuple[str, str], Values] = {}
    for prefix in (names.module_tensor(""), names.master_tensor("")):  # the master counts, so it comes second
        for stored in source.names(prefix):
            found[stored.removeprefix(prefix), WEIGHT] = _stored(source, stored)
    optimizer = source.state["optimizer"]
    for parameter, scalars in ({} if optimizer is None else optimizer["scalars"]).items():
        for key, value in scalars.items():
            if isinstance(value, (bool, int, float)):
                found[parameter, key] = _number(value)
    for stored in source.names("optimizer/"):
        found[names.split_optimizer_tensor(stored)] = _stored(source, stored)
    return found


def difference_of(
    name: str, what: str, a: Values | None, b: Values | None, *, atol: float = 0.0, rtol: float = 0.0
) -> TensorDifference:
    """Compare one pair."""
    described = (a and a.shape, b and b.shape, a and a.dtype, b and b.dtype)
    if a is None or b is None:
        return TensorDifference(name, what, "only in B" if a is None else "only in A", *described)
    is_number = _NUMBER in (a.dtype, b.dtype)
    if a.shape != b.shape and not (is_number and prod(a.shape) == prod(b.shape) == 1):
        return TensorDifference(name, what, "shape", *described)
    largest, scale, different = _distance(a, b)
    relative = 0.0 if largest == 0 else largest / scale if scale else float("inf")
    same_type = is_number or a.dtype == b.dtype
    verdict: Verdict = "equal" if not different and same_type else "dtype" if not different else "values"
    if verdict == "values" and (largest <= atol or relative <= rtol) and (atol or rtol):
        verdict = "within tolerance"
    return TensorDifference(name, what, verdict, *described, largest, relative, different)


def _distance(a: Values, b: Values) -> tuple[float, float, int]:
    """Largest difference, largest absolute value in A, and the number of elements that differ."""
    largest, scale, different = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
    numel = prod(a.shape)
    for start in range(0, numel, _BLOCK_NUMEL):
        length = min(_BLOCK_NUMEL, numel - start)
        one, other = _real(a.read(start, length)), _real(b.read(start, length))
        scale = torch.maximum(scale, one.double().abs().nan_to_num(0.0, posinf=torch.inf).max())
        unequal = _unequal(one, other)
        if count := int(unequal.sum()):
            different += count
            gap = (one[unequal].double() - other[unequal].double()).abs()
            largest = torch.maximum(largest, gap.max())  # NaN goes on
    return float(largest), float(scale), different


def _unequal(one: Tensor, other: Tensor) -> Tensor:
    """Which elements differ: in any bit where the dtypes are the same, else in value."""
    if one.dtype != other.dtype:
        return one.double() != other.double()
    size = one.element_size()
    return (one.view(torch.uint8).view(-1, size) != other.view(torch.uint8).view(-1, size)).any(1)


def _real(values: Tensor) -> Tensor:
    """A complex element becomes two."""
    return torch.view_as_real(values).reshape(-1) if values.is_complex() else values.contiguous()


def _stored(source: CheckpointSource, name: str) -> Values:
    return Values(source.shape(name), dtype_text(source.dtype(name)), lambda start, length: source.read(name, start, length))


def _number(value: float) -> Values:
    return Values((), _NUMBER, lambda start, length: torch.tensor([value], dtype=torch.float64))


def _add_tied(
    own: dict[tuple[str, str], Values], others: Mapping[tuple[str, str], Values], shared: Mapping[str, str]
) -> None:
    """Where the other side stores a tied weight under its second name too, compare that with the owner's value here."""
    for alias, owner in shared.items():
        for name, what in list(others):
            if name == alias and (alias, what) not in own and (owner, what) in own:
                own[alias, what] = own[owner, what]
