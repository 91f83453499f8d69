"""Where the tensors of one launch lie, for kernels that walk many tensors.

    tensors      |  t0: 2 blocks and a bit  | t1 |  t2: 1 block |          BLOCK elements a block
    programs     |   0   |   1   |    2     | 3  |      4       |
    owners       |   0   |   0   |    0     | 1  |      2       |          tensor of each program
    firsts       |   0                      | 3  |      4       |          first program of each tensor
    addresses, numels: of each tensor; K addresses, one for each role (parameter, gradient, ...)

Not here: kernels (`kernels`). Called by `lion` and `lamb`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator

__all__ = ["BLOCK", "NAMES", "Table", "can_run", "table_of"]

BLOCK = 2048
"""Elements of one program."""

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Triton's names of the dtypes that the kernels take."""


class Table(NamedTuple):
    """The table on the device: what a kernel's first arguments are."""

    addresses: Tensor
    """int64, shape (tensors, roles)."""
    numels: Tensor
    """int64, shape (tensors,)."""
    owners: Tensor
    """int32, shape (programs,)."""
    firsts: Tensor
    """int32, shape (tensors + 1,): the last is the number of programs."""


def can_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run on tensors of `dtype` on `device`: Triton knows the device and is installed."""
    return device.type != "cpu" and dtype in NAMES and _has_triton() and get_accelerator().is_triton_supported()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def table_of(*roles: Sequence[Tensor]) -> Table:
    """Describe tensors: `roles[k][t]` plays role k for tensor t. All contiguous, on one device, of one numel for one t."""
    addresses = tuple(tuple(each.data_ptr() for each in of_one) for of_one in zip(*roles, strict=True))
    numels = tuple(each.numel() for each in roles[0])
    return _made(addresses, numels, roles[0][0].device)


@lru_cache(maxsize=32)  # tensors stay where they are: masters and states always, gradients mostly
def _made(addresses: tuple[tuple[int, ...], ...], numels: tuple[int, ...], device: torch.device) -> Table:
    programs = [-(-numel // BLOCK) for numel in numels]
    counts = torch.tensor(programs, dtype=torch.int64)
    firsts = torch.zeros(len(numels) + 1, dtype=torch.int32)
    firsts[1:] = counts.cumsum(0)
    owners = torch.repeat_interleave(torch.arange(len(numels), dtype=torch.int32), counts)
    made = (torch.tensor(addresses, dtype=torch.int64), torch.tensor(numels, dtype=torch.int64), owners, firsts)
    return Table(*(each.to(device) for each in made))
