"""The arithmetic of a mean over ranks: who divides when, in which dtype, and which rank computes which part.

Lives here: `MeanRule` (division before and after the sum), `own_part` (how ranks share one range) and `BlockMean` (the
mean of rows that one process can see, block by block). Does not live here: anything that waits for another rank; that is
`comm.algorithms` and what it chooses from, which call this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepspeed.errors import ArgumentError

__all__ = ["BLOCK_NUMEL", "BlockMean", "MeanRule", "check_range", "divide_", "own_part"]

BLOCK_NUMEL = 131072
"""Elements per block: long enough that calling torch costs little, short enough that a block is still cached when it is read
again. Flat between half and four times this size on a core with 1 MiB of L2."""


@dataclass(frozen=True)
class MeanRule:
    """When the division that turns a sum into a mean happens.

    `prescale_gradients` divides by the world size before the sum; otherwise `gradient_predivide_factor` f divides by f
    before the sum and by world/f after it. The exact result is the same; 16-bit sums overflow or underflow elsewhere.
    """

    world_size: int
    prescale: bool = False
    predivide_factor: float = 1.0

    @property
    def before(self) -> float:
        """What each rank's contribution is divided by."""
        return float(self.world_size) if self.prescale else self.predivide_factor

    @property
    def after(self) -> float:
        """What the sum is divided by."""
        return 1.0 if self.prescale else self.world_size / self.predivide_factor


def check_range(start: int, stop: int, numel: int) -> None:
    """Raise ArgumentError unless `[start, stop)` lies within a buffer of `numel` elements; it may be empty."""
    if not 0 <= start <= stop <= numel:
        raise ArgumentError(
            f"range [{start}, {stop}) given for a buffer of {numel} elements; needed 0 <= start <= stop <= {numel}."
        )


def divide_(tensor: torch.Tensor, divisor: float) -> None:
    """Divide in place, correctly rounded; by a power of two as the faster and equally exact product."""
    if divisor == 1.0:
        return
    if math.frexp(divisor)[0] == 0.5:
        tensor.mul_(1.0 / divisor)
    else:
        tensor.div_(divisor)


def own_part(start: int, stop: int, rank: int, world_size: int, alignment: int = 1) -> tuple[int, int]:
    """Return the part of `[start, stop)` that `rank` computes: parts are disjoint, in rank order, and cover the range.

    Inner borders lie on multiples of `alignment` elements, so that no two ranks write one cache line; a part may be empty.
    """

    def border(k: int) -> int:
        if k in (0, world_size):
            return stop if k else start
        exact = start + (stop - start) * k // world_size
        return min(stop, -(-exact // alignment) * alignment)

    return border(rank), border(rank + 1)


class BlockMean:
    """Mean of equally long rows, block by block: into every row, or into one shard.

    The sum runs in the order of the rows, so every process that computes an element gets the same bits. It is kept in fp32
    (float64 for float64 rows or communication) and rounded once: to the communication dtype, then to the rows' dtype.

    [Note: two 16-bit rows] torch.lerp(a, b, 0.5) on bf16 and fp16 computes b - (b - a) / 2 in fp32 and rounds once. The
    difference of two such numbers is exact in fp32, or else one of them is so small beside the other that the last bit
    of fp32 is far below the rounding to 16 bits. So one pass over memory gives the mean of TWO rows, the general way needs
    six. (Not so for fp32 rows: there a - b would be rounded where a + b cancels.) A lone infinity becomes a NaN.
    """

    def __init__(self, dtype: torch.dtype, communication_dtype: torch.dtype, rule: MeanRule) -> None:
        """Allocate blocks of scratch; memory that is never written costs nothing."""
        self._rule = rule
        wide = torch.promote_types(torch.promote_types(dtype, communication_dtype), torch.float32)
        is_plain = communication_dtype is dtype
        self._is_wide = is_plain and wide is dtype
        self._is_pair = is_plain and dtype.itemsize == 2 and rule.world_size == 2 and rule.before == 1.0
        self._row = torch.empty(BLOCK_NUMEL, dtype=dtype)
        self._sum = torch.empty(BLOCK_NUMEL, dtype=wide)
        self._term = torch.empty(BLOCK_NUMEL, dtype=wide)
        # A contribution is rounded to what would travel; where that changes nothing the pass is left out.
        is_rounded = communication_dtype is not wide and (communication_dtype is not dtype or rule.before != 1.0)
        self._sent = torch.empty(BLOCK_NUMEL, dtype=communication_dtype) if is_rounded else None

    def write(self, rows: Sequence[torch.Tensor], start: int, stop: int) -> None:
        """Set `[start, stop)` of every row to the mean over the rows.

        `rows`: 1-D, as many as the rule's world size, at least two.
        """
        for low in range(start, stop, BLOCK_NUMEL):
            high = min(stop, low + BLOCK_NUMEL)
            blocks = [row[low:high] for row in rows]
            self._mean(blocks, blocks[0])
            for other in blocks[1:]:
                other.copy_(blocks[0])

    def reduce(
        self, rows: Sequence[torch.Tensor], start: int, stop: int, into: torch.Tensor, accumulate: bool = False
    ) -> None:
        """Set `into`, or add to it, the mean over `[start, stop)` of the rows, which are read only.

        Args:
            rows: as for `write`; in the rows' dtype or in that of communication.
            start: first element.
            stop: one past the last.
            into: 1-D, `stop - start` elements of any floating dtype; it may be that range of one of the rows.
            accumulate: add instead.
        """
        is_direct = into.dtype is self._row.dtype and not accumulate
        for low in range(start, stop, BLOCK_NUMEL):
            high = min(stop, low + BLOCK_NUMEL)
            blocks = [row[low:high] for row in rows]
            target = into[low - start : high - start]
            if is_direct:
                self._mean(blocks, target)
                continue
            mean = self._row[: high - low]
            self._mean(blocks, mean)
            if not accumulate:
                target.copy_(mean)
            elif target.dtype is self._term.dtype and target.dtype is not mean.dtype:
                target.add_(self._term[: high - low].copy_(mean))  # faster than an addition of two dtypes
            else:
                target.add_(mean)

    def _mean(self, blocks: list[torch.Tensor], out: torch.Tensor) -> None:
        """Set `out`, of the rows' dtype, to the mean of the blocks; it may be one of them, since it is written last."""
        if self._is_pair:
            torch.lerp(blocks[0], blocks[1], 0.5, out=out)  # [Note: two 16-bit rows]
        elif self._is_wide:
            self._add(blocks, out)
            divide_(out, self._rule.after)
        else:
            self._add_in_scratch(blocks, out)

    def _add(self, blocks: list[torch.Tensor], out: torch.Tensor) -> None:
        numel = len(out)
        total = self._divided(blocks[0], self._sum)
        for block in blocks[1:-1]:
            total = torch.add(total, self._divided(block, self._term), out=self._sum[:numel])
        torch.add(total, self._divided(blocks[-1], self._term), out=out)

    def _divided(self, block: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """The block as it goes into the sum: itself where nothing is divided before, else a copy."""
        if self._rule.before == 1.0:
            return block
        copy = scratch[: len(block)].copy_(block)
        divide_(copy, self._rule.before)
        return copy

    def _add_in_scratch(self, blocks: list[torch.Tensor], out: torch.Tensor) -> None:
        numel = len(out)
        total, term = self._sum[:numel], self._term[:numel]
        sent = None if self._sent is None else self._sent[:numel]
        self._load(blocks[0], total, sent)
        for block in blocks[1:]:
            self._load(block, term, sent)
            total.add_(term)
        divide_(total, self._rule.after)
        out.copy_(total if sent is None else sent.copy_(total))

    def _load(self, block: torch.Tensor, into: torch.Tensor, sent: torch.Tensor | None) -> None:
        if sent is None:
            divide_(into.copy_(block), self._rule.before)
            return
        divide_(sent.copy_(block), self._rule.before)
        into.copy_(sent)
