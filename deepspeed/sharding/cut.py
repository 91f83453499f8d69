"""How the ranks of one axis hold a parameter between them: each a part of it, cut out along one dimension.

    qkv.weight (12, M), rows q0..q3 k0..k3 v0..v3, over 2 ranks       stored order: the parts one after another

    whole      | q0 q1 | q2 q3 | k0 k1 | k2 k3 | v0 v1 | v2 v3 |
    rank 0     | q0 q1 |       | k0 k1 |       | v0 v1 |       |      | q0 q1 k0 k1 v0 v1 |
    rank 1             | q2 q3 |       | k2 k3 |       | v2 v3 |                          | q2 q3 k2 k3 v2 v3 |

A part is what a rank's module holds under the parameter's name: its spans side by side along the dimension, row-major. Parts
may overlap (key/value heads that several ranks need) and may be empty. The same cut says how a layer takes its part, what a
checkpoint stores (the parts, one after another), what is read back on other ranks, and what counts once in a norm.

Does not live here: tensors (`tensor_parallel`, `checkpoint.parts`), which modules are cut (`tensor_parallel.plan`).
Source of the cuts: Megatron-LM (arXiv:1909.08053), section 3; experts along dimension 0, one span each (`moe.auto_ep`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple

from deepspeed.errors import ArgumentError

__all__ = ["Cut", "Span", "even_widths"]


class Span(NamedTuple):
    """Indices `[start, start + length)` along the dimension that is cut."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        """First index after it."""
        return self.start + self.length


@dataclass(frozen=True)
class Cut:
    """The parts of one parameter.

    Attributes:
        shape: of the whole parameter.
        dim: the dimension that is cut, >= 0.
        parts: of each rank of the axis, its spans in the order in which it holds them; together they cover the dimension.
    """

    shape: tuple[int, ...]
    dim: int
    parts: tuple[tuple[Span, ...], ...]

    def __post_init__(self) -> None:
        if not 0 <= self.dim < len(self.shape):
            raise ArgumentError(f"dimension {self.dim} of a tensor of shape {self.shape}: give one below {len(self.shape)}.")
        spans = sorted(span for spans in self.parts for span in spans if span.length)
        reached = 0
        for span in spans:
            if span.start < 0 or span.start > reached:
                break
            reached = max(reached, span.stop)
        if reached != self.shape[self.dim]:
            raise ArgumentError(
                f"parts {self.parts} do not cover dimension {self.dim} of a tensor of shape {self.shape}. Every index needs "
                "a rank, and no span may reach beyond them."
            )

    @classmethod
    def of_widths(cls, shape: Sequence[int], dim: int, *widths: Sequence[int]) -> Cut:
        """Fused sections one after another along `dim`, each cut for itself.

        Args:
            shape: of the whole.
            dim: the dimension.
            *widths: of each section, indices of each rank; of a plain parameter there is one section.
        """
        parts: list[list[Span]] = [[] for _ in widths[0]]
        start = 0
        for section in widths:
            for rank, width in enumerate(section):
                parts[rank].append(Span(start, width))
                start += width
        return cls(tuple(shape), dim, tuple(tuple(spans) for spans in parts))

    @property
    def ranks(self) -> int:
        """How many ranks hold parts."""
        return len(self.parts)

    def width(self, rank: int) -> int:
        """Indices along the dimension that a rank holds."""
        return sum(span.length for span in self.parts[rank])

    def part_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of what a rank holds."""
        return (*self.shape[: self.dim], self.width(rank), *self.shape[self.dim + 1 :])

    @property
    def rows(self) -> int:
        """Product of the dimensions before the one that is cut: a part has as many rows, each of `width x inner`."""
        return prod(self.shape[: self.dim])

    @property
    def inner(self) -> int:
        """Product of the dimensions after it: neighbours in memory for each index."""
        return prod(self.shape[self.dim + 1 :])

    def stored_starts(self) -> tuple[int, ...]:
        """First element of each part in stored order, and, last, how many elements are stored; copies count."""
        numels = (self.rows * self.width(rank) * self.inner for rank in range(self.ranks))
        return (0, *accumulate(numels))

    @property
    def is_in_order(self) -> bool:
        """Whether stored order is the whole's own row-major order: parts need no description on the disk."""
        reached = 0
        for span in (span for spans in self.parts for span in spans if span.length):
            if span.start != reached:
                return False
            reached = span.stop
        return self.rows == 1

    def has_copies(self) -> bool:
        """Whether some index is held by several ranks."""
        return sum(self.width(rank) for rank in range(self.ranks)) != self.shape[self.dim]

    def copies(self, rank: int) -> Iterator[Span]:
        """Of the indices of a rank's part, in its own numbering, those that an earlier rank, or itself before, holds too."""
        held: list[Span] = [span for spans in self.parts[:rank] for span in spans]
        at = 0
        for span in self.parts[rank]:
            yield from (Span(at + found.start - span.start, found.length) for found in _within(span, held))
            held.append(span)
            at += span.length

    def sharers(self, rank: int) -> tuple[int, ...]:
        """Ranks, this one among them, that hold an index which this rank holds."""
        mine = [span for span in self.parts[rank] if span.length]
        return tuple(
            other
            for other, spans in enumerate(self.parts)
            if other == rank or any(_overlap(a, b) for a in mine for b in spans)
        )


def even_widths(numel: int, ranks: int, grain: int = 1) -> tuple[int, ...]:
    """Share `numel` indices out in whole grains, as evenly as they go: the first ranks get one more.

    The last grain may be smaller. Ranks beyond the number of grains get none.
    """
    grains = -(-numel // grain)
    shares = [grains // ranks + (rank < grains % ranks) for rank in range(ranks)]
    stops = [min(grain * stop, numel) for stop in accumulate(shares)]
    return tuple(stop - start for start, stop in zip((0, *stops), stops, strict=False))


def _overlap(one: Span, other: Span) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _within(span: Span, held: Sequence[Span]) -> Iterator[Span]:
    """The parts of `span` that `held` covers, sorted, each index once."""
    reached = span.start
    for other in sorted(held):
        low, high = max(reached, other.start), min(span.stop, other.stop)
        if low < high:
            yield Span(low, high - low)
            reached = high
