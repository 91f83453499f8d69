"""Fragments that each node reads where several nodes store the same elements: its own first, then those of others.

    node 0   |---- a ----|---- b ----|                      from the view of node 1:
    node 1               |-- c --|-- d ---|-- e --|         a (cut) on node 0, then c, d, e

Both nodes' views cover every element once, so both are valid manifests, also of all the folders put together.

Pure. Does not live here: files. Called by `node_save`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from deepspeed.checkpoint.disk import names
from deepspeed.checkpoint.disk.manifest import Fragment, TensorEntry, find_cover_fault
from deepspeed.errors import CheckpointError

__all__ = ["Described", "Span", "entries_for", "join"]


class Span(NamedTuple):
    """Elements `[start, start + length)`, which `rank` writes."""

    rank: int
    start: int
    length: int


class Described(NamedTuple):
    """One global tensor, and all that is written of it anywhere."""

    shape: list[int]
    dtype: str
    spans: list[Span]


def join(pieces_of_ranks: Sequence[Sequence[tuple[str, list[int], str, int, int]]]) -> dict[str, Described]:
    """Put the pieces of all ranks together: `(name, shape, dtype, start, length)` of each, by rank.

    Raises:
        CheckpointError: ranks disagree about a shape or dtype, or an element is written nowhere.
    """
    joined: dict[str, Described] = {}
    for rank, pieces in enumerate(pieces_of_ranks):
        for name, shape, dtype, start, length in pieces:
            known = joined.setdefault(name, Described(list(shape), dtype, []))
            if (list(shape), dtype) != (known.shape, known.dtype):
                raise CheckpointError(
                    f"tensor {name!r} is {dtype} {shape} on rank {rank}, but {known.dtype} {known.shape} on another rank. "
                    "All ranks must describe the same global tensor."
                )
            if length:
                known.spans.append(Span(rank, start, length))
    for name, described in joined.items():
        _fragments(name, described, frozenset())  # raises where there is a hole
    return joined


def entries_for(joined: dict[str, Described], ranks_here: frozenset[int]) -> dict[str, TensorEntry]:
    """The tensors of the manifest of the node on which `ranks_here` run."""
    return {
        name: TensorEntry(
            shape=joined[name].shape, dtype=joined[name].dtype, fragments=_fragments(name, joined[name], ranks_here)
        )
        for name in sorted(joined)
    }


def _fragments(name: str, described: Described, ranks_here: frozenset[int]) -> list[Fragment]:
    numel = prod(described.shape)
    here = sorted((span for span in described.spans if span.rank in ranks_here), key=lambda span: span.start)
    elsewhere = sorted((span for span in described.spans if span.rank not in ranks_here), key=lambda span: span.start)
    taken, gaps = _take([(0, numel)], here)
    more, gaps = _take(gaps, elsewhere)
    if gaps:
        start, stop = gaps[0]
        fault = find_cover_fault(numel, [(0, start), (stop, numel - stop)])
        raise CheckpointError(f"tensor {name!r} {fault}. Nothing was written.")
    return [
        Fragment(
            start=start,
            length=stop - start,
            file=names.shard_file(span.rank),
            key=names.fragment_key(name, span.start, is_whole=span.length == numel),
            offset=start - span.start,
        )
        for start, stop, span in sorted(taken + more)
    ]


def _take(
    gaps: Sequence[tuple[int, int]], spans: Sequence[Span]
) -> tuple[list[tuple[int, int, Span]], list[tuple[int, int]]]:
    """Fill `gaps` (start, stop) with parts of `spans`, sorted by start, each element once; give parts and what is left."""
    taken: list[tuple[int, int, Span]] = []
    left: list[tuple[int, int]] = []
    for start, stop in gaps:
        reached = start
        for span in spans:
            low, high = max(reached, span.start), min(stop, span.start + span.length)
            if low >= high:
                continue
            if low > reached:
                left.append((reached, low))
            taken.append((low, high, span))
            reached = high
        if reached < stop:
            left.append((reached, stop))
    return taken, left
