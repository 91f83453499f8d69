"""A mixture of experts as its papers define it, one token after the other: what the layer's tests compare with.

Switch (arXiv:2101.03961) section 2.2 for one expert, GShard (arXiv:2006.16668) algorithm 1 for two, and for more the
likeliest tokens of each expert within the capacity. No code of the package is used here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def kept_pairs(logits_TE: Tensor, k: int, capacity: int | None, policy: str = "") -> list[tuple[int, int]]:
    """(token, expert) of every pair that is kept. `policy`: default for k = 1, 2 by choice then token, else "probs"."""
    probabilities = logits_TE.softmax(1).tolist()
    experts = range(logits_TE.shape[1])
    choices = [sorted(experts, key=lambda e, p=p: -p[e])[:k] for p in probabilities]  # type: ignore[misc]
    policy = policy or ("choice" if k <= 2 else "probs")
    kept = []
    for expert in experts:
        queue = [(chosen.index(expert), token) for token, chosen in enumerate(choices) if expert in chosen]
        order: dict[str, Callable[[tuple[int, int]], object]] = {
            "choice": lambda pair: pair,
            "position": lambda pair: pair[1],
            "probs": lambda pair, e=expert: -probabilities[pair[1]][e],  # type: ignore[misc]
        }
        kept += [(token, expert) for _, token in sorted(queue, key=order[policy])[:capacity]]
    return sorted(kept)


def weights_of(logits_TE: Tensor, pairs: Sequence[tuple[int, int]], k: int) -> Tensor:
    """(T, E), the weight of each kept pair, 0 elsewhere: its probability, for k > 1 over the sum of its token's."""
    mask_TE = torch.zeros_like(logits_TE)
    for token, expert in pairs:
        mask_TE[token, expert] = 1
    weights_TE = logits_TE.softmax(1) * mask_TE
    if k == 1:
        return weights_TE
    total_T = weights_TE.sum(1, keepdim=True)
    return weights_TE / torch.where(total_T > 0, total_T, 1)


def balance_loss(logits_TE: Tensor, k: int) -> Tensor:
    """Experts times the sum of (mean probability x share of tokens); first choices for k <= 2, all of them above."""
    tokens, experts = logits_TE.shape
    counted = 1 if k <= 2 else k
    chosen = logits_TE.detach().topk(counted, dim=1).indices
    share_E = torch.bincount(chosen.flatten(), minlength=experts).to(logits_TE.dtype) / max(1, tokens * counted)
    return (logits_TE.softmax(1).sum(0) / max(1, tokens) * share_E).sum() * experts


def plain_moe(
    hidden_TM: Tensor, router_EM: Tensor, experts: Sequence[Callable[[Tensor], Tensor]], k: int, capacity: int | None
) -> tuple[Tensor, Tensor]:
    """(output, l_aux): each token goes through each of its kept experts by itself."""
    logits_TE = hidden_TM @ router_EM.T
    weights_TE = weights_of(logits_TE, kept_pairs(logits_TE, k, capacity), k)
    rows = []
    for token, hidden_M in enumerate(hidden_TM):
        row = torch.zeros_like(hidden_M)
        for expert in weights_TE[token].nonzero().flatten().tolist():
            row = row + weights_TE[token, expert] * experts[expert](hidden_M[None])[0]
        rows.append(row)
    output_TM = torch.stack(rows) if rows else hidden_TM * 0
    return output_TM, balance_loss(logits_TE, k)
