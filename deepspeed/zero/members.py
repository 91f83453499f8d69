"""Parameters as flat groups see them: under their names, and by kind.

Does not live here: the groups (`zero.flat`, which shows these names as well).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["ALIGNMENT_BYTES", "Kind", "NamedParameter"]

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

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer updates them."""
        return self.group_index >= 0

    @property
    def alignment(self) -> int:
        """Elements that every parameter's place is a multiple of."""
        return ALIGNMENT_BYTES // min(self.param_dtype.itemsize, self.master_dtype.itemsize)
