"""Bytes that a collective sends, told from torch's operator for it: as any algorithm of the least volume does.

    n ranks, an input of I bytes, an output of O      all-reduce 2 I (n-1)/n    reduce-scatter, all-to-all I (n-1)/n
                                                      all-gather O (n-1)/n      broadcast I (n-1)/n

Called by `planning.tracing`, for each operator of a trace. Does not live here: what was sent in a run (`comm.ledger`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["sent_by", "summed_by"]

_SHARES = {"allreduce": 2, "allgather": 1, "reduce_scatter": 1, "alltoall": 1, "broadcast": 1}


def sent_by(func: Any, args: Sequence[Any]) -> int:
    """Bytes that a rank sends in one operator of torch; 0 for operators that are no collective."""
    if func.namespace != "c10d":
        return 0
    name = func._schema.name.removeprefix("c10d::")
    share = next((times for kind, times in _SHARES.items() if kind in name), 0)
    group = next((each for each in args if _is_group(each)), None)
    if not share or group is None:
        return 0
    size = dist.ProcessGroup.unbox(group).size()
    return share * max(_nbytes(each) for each in args) * (size - 1) // size


def summed_by(func: Any, args: Sequence[Any]) -> int:
    """Bytes of the tensors that an operator adds up over ranks; 0 for other operators."""
    is_sum = func.namespace == "c10d" and "allreduce" in func._schema.name
    return max(_nbytes(each) for each in args) if is_sum else 0


def _is_group(value: Any) -> bool:
    return hasattr(value, "_type") and "ProcessGroup" in str(value._type())


def _nbytes(value: Any) -> int:
    """Of inputs or of outputs: the larger side is what all ranks have together."""
    return sum(each.numel() * each.element_size() for each in tree_leaves(value) if isinstance(each, Tensor))
