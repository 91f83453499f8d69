"""The mean of a loss over the tokens that count on all ranks that share a sequence, and its gradient.

    rank 0   loss 2.0 over 3 tokens     rank 1   loss 4.0 over 1 token      -->  (2.0 x 3 + 4.0 x 1) / 4 = 2.5 on both

[Note: one objective on every rank] Every rank computes the loss of the whole sequence and calls backward on it, so together
they differentiate as many copies of it as there are ranks; a copy that went through a collective gives its gradient to
all. The mean of parameter gradients over sequence ranks, which the engine takes, is then the gradient of the one loss.

Lives here: the mean and the gather, with gradients. Called by user loops, by `sequence.cross_entropy`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.comm import differentiable
from deepspeed.common.compiling import not_compiled
from deepspeed.topology import groups

__all__ = ["gathered_sequence", "mean_over_sequence"]


@not_compiled
def mean_over_sequence(loss: Tensor, num_tokens: Tensor | int, group: comm.ProcessGroup | None = None) -> Tensor:
    """Return the mean of `loss` over the tokens of all ranks of a group, the same on all of them.

    Every rank of the group must call it, and call backward on what it returns. Blocks on one small all-reduce, and on
    one more in backward. See [Note: one objective on every rank].

    Args:
        loss: this rank's mean over its tokens that count, a scalar; anything (also not a number) where it has none.
        num_tokens: how many of this rank's tokens count: `(shift_labels != -100).sum()`.
        group: the ranks; None means those that share a sequence in the current mesh.

    Returns:
        A scalar, 0 where no token of any rank counts; in fp32 for a 16-bit loss, which could hold neither the number of
        tokens nor the sum.
    """
    if group is None:
        group = groups.get_current().axis("sequence").group
    wide = torch.promote_types(loss.dtype, torch.float32)
    count = torch.as_tensor(num_tokens, device=loss.device).to(wide)
    part = torch.where(count > 0, loss, torch.zeros_like(loss)).to(wide) * count
    total = differentiable.reduce(differentiable.copy(torch.stack([part, count]), group), group)
    return total[0] / total[1].clamp(min=1)


@not_compiled
def gathered_sequence(part: Tensor, group: comm.ProcessGroup | None) -> Tensor:
    """Put the parts of all ranks one after another along dimension 0; backward adds the gradients of all copies.

    Every rank of the group must call it, with a part of the same shape.
    """
    return differentiable.all_gather(part, 0, group)
