"""How the slices of tensor-parallel ranks become whole tensors, by what a model says of itself.

    universal_checkpoint_info   patterns (re.match) -> a kind of joining; what matches no pattern is joined along dimension 0

    column (default)    rank 0 over rank 1            sub-parameters   q0 q1 | k0 k1 | v0 v1  (each joined by itself)
    row                 side by side, dimension 1     vocabulary       over each other, padding rows cut off
    replicated          the first rank's              averaged         the mean

Automatic tensor parallelism also states where every element belongs (`affine`); where it does, that counts.

Does not live here: what the slices are (`slices`). Called by `stages`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from deepspeed.checkpoint.original.reading.affine import AffineMap
from deepspeed.checkpoint.original.reading.assembled import Joined, Mean, Section, Stored
from deepspeed.errors import CheckpointError

__all__ = ["SubParameters", "TensorParallelRules"]

_REPLICATED = ("tp_replicated_parameter_patterns", "pipeline_replicated_parameter_patterns")
_AVERAGED = "parameter_to_average_patterns"
_ROW = "parameter_with_row_parallelism_patterns"
_VOCABULARY = "vocabulary_parameter_patterns"
_TWO = "parameter_with_2_sub_params_cat_dim_0"
_SUB = "parameter_with_sub_params"
_UNSUPPORTED = ("autotp_unsupported_parameter_patterns", "sub_param_shard_widths")
_AFFINE = "affine_map"


class SubParameters(NamedTuple):
    """A parameter made of several that are cut each by itself.

    Seen with the whole parameter's `view` shape, they have the `sizes` along its dimension `dim`.
    """

    sizes: tuple[int, ...]
    dim: int
    view: tuple[int, ...]


class TensorParallelRules:
    """The rules of one checkpoint.

    Args:
        info: its `universal_checkpoint_info`; None where the model gave none.
        degree: tensor-parallel ranks.
    """

    def __init__(self, info: Mapping[str, Any] | None, degree: int) -> None:
        self._info = info
        self._degree = degree
        self._affine = AffineMap(info[_AFFINE]) if info and info.get(_AFFINE) and degree > 1 else None

    def join(self, name: str, slices: Sequence[Stored]) -> Stored:
        """The whole tensor from the slices of all tensor-parallel ranks, in order.

        Raises:
            CheckpointError: the checkpoint does not say how.
        """
        first = slices[0]
        if self._degree == 1:
            return first
        if self._info is None:
            raise CheckpointError(
                f"{name!r} lies in {self._degree} slices of tensor-parallel ranks, and the checkpoint has no "
                "universal_checkpoint_info that says how they fit together. Give the model an attribute of that name where "
                "it was saved and save again, or consolidate it there."
            )
        if self._affine is not None and (whole := self._affine.join(name, slices)) is not None:
            return whole
        if not first.shape or self._matches(name, *_REPLICATED):
            return first
        return self._join_parts(name, slices)

    def _join_parts(self, name: str, slices: Sequence[Stored]) -> Stored:
        first = slices[0]
        for key in _UNSUPPORTED:
            if self._matches(name, key):
                raise CheckpointError(
                    f"{name!r} is cut by {key}, which cannot be put together. Consolidate it where it was saved."
                )
        if self._matches(name, _AVERAGED):
            return Stored(first.shape, first.dtype, Mean([s.values for s in slices]))
        if sub := self._sub_parameters(name, first):
            return _joined_by_parts(name, slices, sub)
        if self._matches(name, _ROW) and len(first.shape) > 1:
            return _joined(slices, 1)
        whole = _joined(slices, 0)
        return self._without_padding(whole) if self._matches(name, _VOCABULARY) else whole

    def _matches(self, name: str, *keys: str) -> bool:
        info = self._info or {}
        return any(re.match(pattern, name) for key in keys for pattern in info.get(key) or ())

    def _sub_parameters(self, name: str, first: Stored) -> SubParameters | None:
        if self._matches(name, _TWO):
            rows = first.shape[0] * self._degree
            return SubParameters((rows // 2, rows // 2), 0, (rows, *first.shape[1:]))
        for entry in (self._info or {}).get(_SUB) or ():
            fields = entry if isinstance(entry, Mapping) else vars(entry)
            if any(re.match(pattern, name) for pattern in fields["patterns"]):
                sizes = [tuple(size) if isinstance(size, tuple | list) else (size,) for size in fields["shape"]]
                view = tuple(sum(size) for size in sizes)
                return SubParameters(sizes[fields["partition_dim"]], fields["partition_dim"], view)
        return None

    def _without_padding(self, whole: Stored) -> Stored:
        rows = int((self._info or {}).get("original_vocab_size") or whole.shape[0])
        return Stored((min(rows, whole.shape[0]), *whole.shape[1:]), whole.dtype, whole.values)


def _joined(slices: Sequence[Stored], dim: int) -> Stored:
    sizes = [s.shape[dim] for s in slices]
    shape = (*slices[0].shape[:dim], sum(sizes), *slices[0].shape[dim + 1 :])
    rows, behind = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    sections = [Section(number, 0, size * behind) for number, size in enumerate(sizes)]
    return Stored(shape, slices[0].dtype, Joined([s.values for s in slices], sections, rows))


def _joined_by_parts(name: str, slices: Sequence[Stored], sub: SubParameters) -> Stored:
    """Every sub-parameter joined by itself; each rank holds an equal part of each."""
    degree, first = len(slices), slices[0]
    rows, behind = math.prod(sub.view[: sub.dim]), math.prod(sub.view[sub.dim + 1 :])
    if any(size % degree for size in sub.sizes) or math.prod(sub.view) != sum(s.numel for s in slices):
        raise CheckpointError(
            f"{name!r} is said to have shape {sub.view} with parts of {sub.sizes} along dimension {sub.dim}, which {degree} "
            f"slices of shape {first.shape} do not make up."
        )
    widths = [size // degree * behind for size in sub.sizes]
    starts = [0, *accumulate(widths)]
    sections = [Section(rank, start, width) for start, width in zip(starts, widths, strict=False) for rank in range(degree)]
    return Stored(_whole_shape(first, sub, behind, degree), first.dtype, Joined([s.values for s in slices], sections, rows))


def _whole_shape(first: Stored, sub: SubParameters, behind: int, degree: int) -> tuple[int, ...]:
    """The parameter's own shape: that of a slice, larger in the dimension that the view's `dim` is."""
    if len(first.shape) == len(sub.view):
        return sub.view
    cut = next((dim for dim in range(len(first.shape)) if math.prod(first.shape[dim + 1 :]) == behind), 0)
    return (*first.shape[:cut], first.shape[cut] * degree, *first.shape[cut + 1 :])
