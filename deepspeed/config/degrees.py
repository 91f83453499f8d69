"""How many ranks share a sequence, and a layer, as a raw config says it: asked before anything else of it.

    sequence_parallel_size                                --> sequence     tokens of one sample over ranks (Ulysses)
    tensor_parallel.autotp_size, .tp.tp_size              --> tensor       parts of a layer over ranks (AutoTP)

Values that are no whole numbers count as 1 here: the check of the config, which follows, names them. Called by
`engine.degrees`, which knows what `initialize` was told besides, and by the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["sequence_ranks", "tensor_block", "tensor_ranks", "whole"]


def sequence_ranks(raw: Mapping[str, Any]) -> int:
    """Ranks that share a sequence."""
    return whole(raw.get("sequence_parallel_size"))


def tensor_ranks(raw: Mapping[str, Any]) -> int:
    """Ranks that share a layer."""
    block = tensor_block(raw)
    inner = block.get("tensor_parallel", block.get("tp"))
    size = whole(block.get("autotp_size"))
    return size if size > 1 or not isinstance(inner, Mapping) else whole(inner.get("tp_size"))


def tensor_block(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The block `tensor_parallel`; empty where it is left out, or no block."""
    block = raw.get("tensor_parallel")
    return block if isinstance(block, Mapping) else {}


def whole(size: object) -> int:
    """A number of ranks; 1 for what is none."""
    return size if isinstance(size, int) and not isinstance(size, bool) and size >= 1 else 1
