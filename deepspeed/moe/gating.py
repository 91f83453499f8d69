"""Which experts each token goes to, with which weight, and who is dropped: tensors in, a `Routing` out.

    logits_TE (at least fp32) -> probabilities -> k experts per token -> queues: who is kept -> weights, l_aux, counts

    tokens 0..4, k = 1, experts a b, capacity 2         expert_KT  a  b  a  a  b
                                                        queue of a: 0 2 3   (3 is beyond the capacity: dropped)
                                                        queue of b: 1 4
                                                        pair_P     0 2 | 1 4 | -  rows, expert after expert
                                                        slot_KT    0  2  1  P  3  (P: no row)

Everything is an index of the pairs (choice, token): no tensor here is tokens x experts x capacity. Letters: `T` tokens,
`E` experts of the whole layer, `K` choices per token, `P` = K*T pairs, `R` kept pairs = rows. Pair p is choice p // T of
token p % T. Nothing here waits for a device: how many rows there are stays in `kept_E`.

Lives here: arithmetic on one rank's tokens; no group, no module. Called by `moe.gate` and `moe.dense`.

Sources: Switch (arXiv:2101.03961) sections 2.2 and 3.3, GShard (arXiv:2006.16668) algorithm 1, ST-MoE (arXiv:2202.08906)
equation 5, DeepSpeed-MoE (arXiv:2201.05596).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deepspeed.errors import ArgumentError

__all__ = [
    "DropPolicy",
    "Pairs",
    "Routing",
    "RoutingFacts",
    "at_least_fp32",
    "capacity_of",
    "pairs_of",
    "route_first",
    "route_first_two",
    "route_k",
    "z_loss_of",
]

DropPolicy = Literal["probs", "position"]

_ROUNDING = 1e-14  # of three products: 100 x 1.1 = 110.00000000000001 is 110 rows, not 111


@dataclass(frozen=True)
class RoutingFacts:
    """What a routing came to, without a graph; figures are computed when they are asked for.

    Attributes:
        probabilities_TE: of the router, before any choice.
        routed_E: pairs that chose each expert.
        kept_E: of these, those that were not dropped.
    """

    probabilities_TE: Tensor
    routed_E: Tensor
    kept_E: Tensor

    def dropped_share(self) -> Tensor:
        """Dropped pairs over all pairs, between 0 and 1; 0 without tokens."""
        routed = self.routed_E.sum()
        return (routed - self.kept_E.sum()) / routed.clamp(min=1)

    def entropy(self) -> Tensor:
        """Mean over tokens of the entropy of the router's probabilities, in nats: log E undecided, 0 sure or no tokens."""
        total: Tensor = torch.special.entr(self.probabilities_TE).sum()
        return total / max(1, self.probabilities_TE.shape[0])


@dataclass(frozen=True)
class Routing:
    """The way of one rank's tokens.

    Attributes:
        expert_KT: the expert of each pair; E for a pair that goes nowhere (a token not in use).
        weight_KT: what an expert's output is multiplied by, 0 for a pair that is not kept; carries the router's gradient.
        pair_P: first the R kept pairs in the order of their rows: expert after expert, each in the order of its queue. What
            follows has no meaning.
        slot_KT: row of each pair; P where it has none.
        kept_E: rows of each expert; they add up to R.
        capacity: rows that an expert takes at most; None when nothing is dropped.
        l_aux: the load-balancing loss, a scalar with a graph.
        exp_counts: pairs that chose each expert, dropped ones included.
        facts: the same for monitors.
    """

    expert_KT: Tensor
    weight_KT: Tensor
    pair_P: Tensor
    slot_KT: Tensor
    kept_E: Tensor
    capacity: int | None
    l_aux: Tensor
    exp_counts: Tensor
    facts: RoutingFacts


@dataclass(frozen=True)
class Pairs:
    """What of a `Routing` moving rows needs, where somebody else has chosen experts and weights.

    Attributes:
        pair_P: as in `Routing`; pairs that go nowhere come last.
        slot_KT: row of each pair; R or more where it has none.
        kept_E: rows of each expert.
    """

    pair_P: Tensor
    slot_KT: Tensor
    kept_E: Tensor


def pairs_of(expert_TK: Tensor, num_experts: int) -> Pairs:
    """Sort the pairs of a router's choice; `num_experts` in the place of an expert sends a pair nowhere."""
    expert_KT = expert_TK.T.contiguous()
    expert_P = expert_KT.view(-1).long()
    counts_Q = torch.zeros(num_experts + 1, dtype=torch.int64, device=expert_P.device)
    counts_Q.scatter_add_(0, expert_P, torch.ones_like(expert_P))
    pair_P = expert_P.argsort(stable=True)
    slot_P = torch.empty_like(pair_P)
    slot_P[pair_P] = torch.arange(pair_P.numel(), device=pair_P.device)
    return Pairs(pair_P, slot_P.view_as(expert_KT), counts_Q[:num_experts])


def at_least_fp32(values: Tensor) -> Tensor:
    """The same values in fp32, or in float64 if they are: what a router computes in."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def capacity_of(logits_TE: Tensor, capacity_factor: float, min_capacity: int, k: int = 1) -> int:
    """Rows that one expert takes at most: `max(min_capacity, ceil(tokens / experts * capacity_factor * k))`.

    Source: Switch, equation 3; GShard, section 2.2.
    """
    tokens, experts = logits_TE.shape
    rows = tokens / experts * (capacity_factor * k)
    return max(int(min_capacity), math.ceil(rows * (1 - _ROUNDING)))


def z_loss_of(logits_TE: Tensor) -> Tensor:
    """Router z-loss: mean over tokens of the squared log-sum-exp of the logits; keeps logits small. 0 without tokens.

    Source: ST-MoE, equation 5.
    """
    return logits_TE.logsumexp(dim=1).square().sum() / max(1, logits_TE.shape[0])


def route_first(
    logits_TE: Tensor,
    capacity: int | None,
    *,
    used_T: Tensor | None = None,
    noise_TE: Tensor | None = None,
    picks_TE: Tensor | None = None,
) -> Routing:
    """Send each token to its best expert; its weight is the probability itself (Switch, equation 2).

    Args:
        logits_TE: of the router, at least fp32.
        capacity: rows that an expert takes at most; None keeps all.
        used_T: tokens that take part (non-zero); None: all.
        noise_TE: added to the logits for the choice alone (Gumbel noise makes it a sample of the softmax).
        picks_TE: uniform numbers by which a full expert chooses whom it keeps, the largest first (random token selection);
            None: the first tokens.
    """
    probabilities_TE = logits_TE.softmax(dim=1)
    expert_1T = (logits_TE if noise_TE is None else logits_TE + noise_TE).argmax(dim=1)[None]
    expert_1T = _without_unused(expert_1T, used_T, logits_TE.shape[1])
    priority_1T = None if picks_TE is None else _at(picks_TE, expert_1T)
    weight_1T = _at(probabilities_TE, expert_1T)
    return _routing(probabilities_TE, expert_1T, weight_1T, capacity, priority_KT=priority_1T, normalizes=False)


def route_first_two(
    logits_TE: Tensor, capacity: int | None, *, used_T: Tensor | None = None, noise_TE: Tensor | None = None
) -> Routing:
    """Send each token to its two best experts; weights are the two probabilities over their sum.

    All first choices queue before all second ones. The load-balancing loss counts first choices (GShard, algorithm 1).

    Args:
        logits_TE: of the router, at least fp32.
        capacity: rows that an expert takes at most; None keeps all.
        used_T: tokens that take part (non-zero); None: all.
        noise_TE: added to the logits for the second choice alone; Gumbel noise makes it a sample of what is left.
    """
    probabilities_TE = logits_TE.softmax(dim=1)
    first_T = logits_TE.argmax(dim=1)
    noisy_TE = logits_TE if noise_TE is None else logits_TE + noise_TE
    second_T = noisy_TE.scatter(1, first_T[:, None], -math.inf).argmax(dim=1)
    expert_2T = _without_unused(torch.stack([first_T, second_T]), used_T, logits_TE.shape[1])
    weight_2T = _at(probabilities_TE, expert_2T)
    return _routing(probabilities_TE, expert_2T, weight_2T, capacity, normalizes=True, balances=1)


def route_k(
    logits_TE: Tensor,
    k: int,
    capacity: int | None,
    *,
    used_T: Tensor | None = None,
    drop_policy: DropPolicy = "probs",
) -> Routing:
    """Send each token to its k best experts; weights are the kept probabilities over their sum.

    Args:
        logits_TE: of the router, at least fp32.
        k: experts per token, 1 to E.
        capacity: rows that an expert takes at most; None keeps all.
        used_T: tokens that take part (non-zero); None: all.
        drop_policy: whom a full expert keeps: the most probable (`probs`), or the first in the batch (`position`).

    Raises:
        ArgumentError: k is outside 1 to E, or the policy is not one of the two.
    """
    experts = logits_TE.shape[1]
    if not 1 <= k <= experts:
        raise ArgumentError(f"k={k} of {experts} experts: a token can go to 1 to {experts} of them.")
    if drop_policy not in ("probs", "position"):
        raise ArgumentError(
            f"drop_policy={drop_policy!r}: it is 'probs' (keep the likeliest) or 'position' (keep the first)."
        )
    probabilities_TE = logits_TE.softmax(dim=1)
    expert_KT = _without_unused(probabilities_TE.topk(k, dim=1).indices.T.contiguous(), used_T, experts)
    weight_KT = _at(probabilities_TE, expert_KT)
    tokens = expert_KT.shape[1]
    priority_KT = (
        weight_KT.detach() if drop_policy == "probs" else -torch.arange(tokens, device=logits_TE.device).expand(k, tokens)
    )
    return _routing(probabilities_TE, expert_KT, weight_KT, capacity, priority_KT=priority_KT, normalizes=True, balances=k)


# -- parts ----------------------------------------------------------------------------------------------------------------


def _routing(
    probabilities_TE: Tensor,
    expert_KT: Tensor,
    weight_KT: Tensor,
    capacity: int | None,
    *,
    normalizes: bool,
    priority_KT: Tensor | None = None,
    balances: int = 1,
) -> Routing:
    """Queue the pairs, drop those beyond the capacity, and weigh the rest; the first `balances` choices enter l_aux."""
    (tokens, experts), choices = probabilities_TE.shape, expert_KT.shape[0]
    counts_KE = torch.zeros(choices, experts + 1, dtype=torch.int64, device=expert_KT.device)
    counts_KE = counts_KE.scatter_add_(1, expert_KT, torch.ones_like(expert_KT))[:, :experts]
    routed_E = counts_KE.sum(dim=0)
    is_full = capacity is not None and capacity < tokens  # an expert gets each token once at most
    kept_E = routed_E.clamp(max=capacity) if is_full else routed_E
    pair_P, slot_KT = _queues(expert_KT, routed_E, kept_E, priority_KT if is_full else None)
    if is_full:
        weight_KT = weight_KT * (slot_KT < slot_KT.numel())
    if normalizes:
        total_T = weight_KT.sum(dim=0)
        weight_KT = weight_KT / total_T.clamp(min=torch.finfo(total_T.dtype).eps)
    share_E = counts_KE[:balances].sum(dim=0).to(probabilities_TE.dtype) / max(1, tokens * balances)
    l_aux = (probabilities_TE.sum(dim=0) / max(1, tokens) * share_E).sum() * experts
    facts = RoutingFacts(probabilities_TE.detach(), routed_E, kept_E)
    exp_counts = routed_E.clone()  # the caller's, who may add those of other ranks to it in place
    return Routing(expert_KT, weight_KT, pair_P, slot_KT, kept_E, capacity, l_aux, exp_counts, facts)


def _queues(expert_KT: Tensor, routed_E: Tensor, kept_E: Tensor, priority_KT: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (pair_P, slot_KT) of a `Routing`: pairs sorted by expert, in an expert by priority, then by their number."""
    expert_P, pairs = expert_KT.flatten(), expert_KT.numel()
    if priority_KT is None:
        order_P = expert_P.argsort(stable=True)
    else:
        by_priority_P = priority_KT.flatten().argsort(descending=True, stable=True)
        order_P = by_priority_P[expert_P[by_priority_P].argsort(stable=True)]
    # Pairs that go nowhere sort behind all experts: a queue of their own, of which nobody is kept.
    nobody = kept_E.new_zeros(1)
    starts_Q = torch.cat([nobody, routed_E.cumsum(0)])
    rows_Q = torch.cat([nobody, kept_E.cumsum(0)])
    kept_Q = torch.cat([kept_E, nobody])
    sorted_P = expert_P[order_P]
    place_P = torch.arange(pairs, device=order_P.device) - starts_Q[sorted_P]
    row_P = torch.where(place_P < kept_Q[sorted_P], rows_Q[sorted_P] + place_P, pairs)
    slot_P = torch.empty_like(order_P)
    slot_P[order_P] = row_P
    pair_P = order_P.new_zeros(pairs + 1)
    pair_P[row_P] = order_P  # all that have no row land on the one place behind
    return pair_P[:pairs], slot_P.view_as(expert_KT)


def _at(values_TE: Tensor, expert_KT: Tensor) -> Tensor:
    """Return `values_TE` at each pair's expert, as (K, T); 0 where a pair goes nowhere."""
    experts = values_TE.shape[1]
    found_TK = values_TE.gather(1, expert_KT.T.clamp(max=experts - 1))
    return torch.where(expert_KT < experts, found_TK.T, 0)


def _without_unused(expert_KT: Tensor, used_T: Tensor | None, experts: int) -> Tensor:
    """Send the pairs of tokens not in use nowhere."""
    if used_T is None:
        return expert_KT
    if used_T.numel() != expert_KT.shape[1]:
        raise ArgumentError(
            f"used_token has {used_T.numel()} elements, there are {expert_KT.shape[1]} tokens. Give one per token, 0 or 1."
        )
    return torch.where(used_T.flatten().bool(), expert_KT, experts)
