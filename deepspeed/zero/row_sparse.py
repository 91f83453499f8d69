r"""Mean over ranks of gradients that are zero in most rows: only the rows that some rank touched travel.

    rank 0   rows 3, 7      \   all-gather of counts, row numbers, rows        rows 3 7 9 of the mean,
    rank 1   rows 7, 9      /   (padded to the longest)                  -->   bit-identical on every rank

Used for `nn.Embedding(sparse=True)` and, with `sparse_gradients`, for every embedding table. The gradient itself stays a
dense view of the flat buffer, so the optimizer and the norm need no second path.

Does not live here: which tables (`engine.build`), when (`zero.reducer`, the caller).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.topology.mesh import AxisGroup


def mean_rows(grad_VD: Tensor, axis: AxisGroup) -> None:
    """Replace `grad_VD` (V rows, any trailing shape) by its mean over the ranks of `axis`, in place.

    Collective over `axis`. Rows are added in rank order, so all ranks hold the same bits. Communicates
    `ranks x longest x row` elements, where `longest` is the largest number of non-zero rows on any rank.
    """
    if axis.size == 1:
        return
    flat_VD = grad_VD.view(grad_VD.shape[0], -1)
    rows_N = (flat_VD != 0).any(dim=1).nonzero().squeeze(1)
    counts_R = _gather(rows_N.new_tensor([rows_N.numel()]), axis).view(-1).tolist()
    longest = max(counts_R)
    padded_rows_L = rows_N.new_zeros(longest)
    padded_rows_L[: rows_N.numel()] = rows_N
    padded_LD = flat_VD.new_zeros(longest, flat_VD.shape[1])
    padded_LD[: rows_N.numel()] = flat_VD[rows_N]
    all_rows_RL = _gather(padded_rows_L, axis)
    all_values_RLD = _gather(padded_LD, axis)
    flat_VD[rows_N] = 0
    for rank, count in enumerate(counts_R):
        flat_VD.index_add_(0, all_rows_RL[rank, :count], all_values_RLD[rank, :count] / axis.size)


def _gather(part: Tensor, axis: AxisGroup) -> Tensor:
    whole = torch.empty(axis.size, *part.shape, dtype=part.dtype, device=part.device)
    comm.all_gather_into_tensor(whole.view(-1), part.contiguous().view(-1), group=axis.group)
    return whole
