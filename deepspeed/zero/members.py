"""Parameters as flat groups see them: under their names, by kind, and in their places.

Does not live here: the groups (`zero.flat`, which shows these names as well).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import nn

__all__ = ["ALIGNMENT_BYTES", "Kind", "NamedParameter", "Place"]

_Group = TypeVar("_Group")

ALIGNMENT_BYTES = 64  # a cache line, and the widest vector register


@dataclass(frozen=True)
class NamedParameter:
    """A parameter under the name its module gives it; tied parameters appear once, under their first name."""

    name: str
    param: nn.Parameter
    order: int = 0
    """Position in the model's own order of registration, the best guess at the order of use before the first step."""

    unit: int = 0
    """Number of the unit it is gathered with, where parameters are sharded."""

    whole_shape: torch.Size | None = None
    """Of a parameter that is sharded already (`zero.Init`), whose own shape is (0,); None: ask the parameter."""


@dataclass(frozen=True)
class Kind:
    """What the parameters of one flat group have in common."""

    group_index: int
    """Of the optimizer's parameter group; -1 when nothing trains them."""

    param_dtype: torch.dtype
    master_dtype: torch.dtype
    is_sharded: bool = False
    is_row_sparse: bool = False
    """Embedding tables of which one micro-batch touches few rows: their gradients are reduced row by row."""

    is_low_precision: bool = False
    """Gradients travel in the autocast dtype (`lower_precision_safe_modules`)."""

    tie: str = ""
    """Key of the pipeline's tied module that they belong to, when other stages hold copies; see `zero.ties`."""

    is_expert: bool = False
    """Other ranks hold other experts in their place: they have their own shard axis."""

    is_part: bool = False
    """Tensor-parallel ranks hold other parts of them."""

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer updates them."""
        return self.group_index >= 0

    @property
    def alignment(self) -> int:
        """Elements that every parameter's place is a multiple of."""
        return ALIGNMENT_BYTES // min(self.param_dtype.itemsize, self.master_dtype.itemsize)


class Place(Generic[_Group]):
    """Where a parameter lives, without keeping anything alive; a copy or a pickle of the parameter lives nowhere."""

    def __init__(self, group: _Group, position: int, param: nn.Parameter) -> None:
        self.position = position
        self._group = weakref.ref(group)
        self._param = weakref.ref(param)

    def group_of(self, param: nn.Parameter) -> _Group | None:
        """The flat group, None when it is gone or `param` is a copy."""
        return self._group() if self._param() is param else None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None, so that a saved model loads where this package is not installed."""
        return type(None), ()
