"""Fragments that each node reads where several nodes store the same elements: its own first, then those of others.

    node 0   |---- a ----|---- b ----|                      from the view of node 1:
    node 1               |-- c --|-- d ---|-- e --|         a (cut) on node 0, then c, d, e

Both nodes' views cover every element once, so both are valid manifests, also of all the folders put together.

Pure. Does not live here: files. Called by `node_save`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deepspeed.checkpoint.disk import names
from deepspeed.checkpoint.disk.manifest import Fragment, TensorEntry, find_cover_fault
from deepspeed.checkpoint.save.description import Described, Description
from deepspeed.errors import CheckpointError

__all__ = ["Joined", "Written", "entries_for", "join"]


class Written(NamedTuple):
    """Elements `[start, start + length)` of what is stored, which `rank` writes."""

    rank: int
    start: int
    length: int


class Joined(NamedTuple):
    """One global tensor, and all that is written of it anywhere."""

    tensor: Described
    written: list[Written]


def join(pieces_of_ranks: Sequence[Sequence[Description]]) -> dict[str, Joined]:
    """Put the pieces of all ranks together, by rank as `description.describe` gives them.

    Raises:
        CheckpointError: ranks disagree about a shape, dtype or cut, or an element is written nowhere.
    """
    joined: dict[str, Joined] = {}
    first_ranks: dict[str, int] = {}
    for rank, pieces in enumerate(pieces_of_ranks):
        for name, shape, dtype, start, length, cut in pieces:
            own = Described(list(shape), dtype, cut)
            known = joined.setdefault(name, Joined(own, []))
            own.require_same(known.tensor, name, rank, first_ranks.setdefault(name, rank))
            if length:
                known.written.append(Written(rank, start, length))
    for name, each in joined.items():
        _fragments(name, each, frozenset())  # raises where there is a hole
    return joined


def entries_for(joined: dict[str, Joined], ranks_here: frozenset[int]) -> dict[str, TensorEntry]:
    """The tensors of the manifest of the node on which `ranks_here` run."""
    return {name: joined[name].tensor.entry(_fragments(name, joined[name], ranks_here)) for name in sorted(joined)}


def _fragments(name: str, joined: Joined, ranks_here: frozenset[int]) -> list[Fragment]:
    numel = joined.tensor.stored_numel
    here = sorted((each for each in joined.written if each.rank in ranks_here), key=lambda each: each.start)
    elsewhere = sorted((each for each in joined.written if each.rank not in ranks_here), key=lambda each: each.start)
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
            file=names.shard_file(each.rank),
            key=names.fragment_key(name, each.start, is_whole=joined.tensor.is_whole(each.length)),
            offset=start - each.start,
        )
        for start, stop, each in sorted(taken + more)
    ]


def _take(
    gaps: Sequence[tuple[int, int]], written: Sequence[Written]
) -> tuple[list[tuple[int, int, Written]], list[tuple[int, int]]]:
    """Fill `gaps` (start, stop) with parts of `written`, sorted by start, each element once; give parts and what is left."""
    taken: list[tuple[int, int, Written]] = []
    left: list[tuple[int, int]] = []
    for start, stop in gaps:
        reached = start
        for each in written:
            low, high = max(reached, each.start), min(stop, each.start + each.length)
            if low >= high:
                continue
            if low > reached:
                left.append((reached, low))
            taken.append((low, high, each))
            reached = high
        if reached < stop:
            left.append((reached, stop))
    return taken, left
