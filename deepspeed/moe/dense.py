"""The published gating functions, which give tensors of tokens x experts x capacity.

    l_aux, combine_weights_TEC, dispatch_mask_TEC, exp_counts_E = top1gating(logits_TE, capacity_factor=1.0, min_capacity=4)

    inputs_ECM = einsum("tec,tm->ecm", dispatch_mask, hidden)
    output_TM = einsum("tec,ecm->tm", combine_weights, outputs_ECM)

For callers of the original's functions, and as a picture of what a routing means. The layer itself never makes them: it uses
the `Routing` that they are made of (`moe.gating`). `C` = capacity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.moe.gating import DropPolicy, Routing, at_least_fp32, capacity_of, route_first, route_first_two, route_k
from deepspeed.moe.noise import gumbel_like, uniform_like

__all__ = ["top1gating", "top2gating", "topkgating"]

Gated = tuple[Tensor, Tensor, Tensor, Tensor] | tuple[Tensor, int, int, Tensor, Tensor, Tensor, Tensor]
"""What the functions return: four tensors, or seven things with `sparse_routes`."""


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: comm.ProcessGroup | None = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> Gated:
    """Route each token to one expert.

    Args:
        logits: of the router, (T, E).
        capacity_factor: see `capacity_of`.
        min_capacity: see `capacity_of`.
        used_token: (T,), 0 for tokens that go nowhere.
        noisy_gate_policy: `"RSample"` samples the expert; any other value changes nothing here.
        drop_tokens: drop what is beyond the capacity; False: the capacity becomes that of the fullest expert.
        use_rts: a full expert keeps tokens drawn at random, in place of the first ones.
        ep_group: without `drop_tokens`, ranks that must agree on the capacity; all of them call this.
        sparse_routes: return indices in place of the two large tensors.
        use_tutel: has no effect; the layer never makes these tensors.

    Returns:
        `(l_aux, combine_weights (T, E, C), dispatch_mask (T, E, C), exp_counts (E,))`; with `sparse_routes`
        `(l_aux, C, E, expert (K, T), place in its queue (K, T), weight (K, T), exp_counts (E,))`, expert -1 where dropped.
    """
    logits = at_least_fp32(logits)
    capacity = capacity_of(logits, capacity_factor, min_capacity) if drop_tokens else None
    noise = gumbel_like(logits) if noisy_gate_policy == "RSample" else None
    picks = uniform_like(logits) if use_rts and drop_tokens else None
    return _published(
        route_first(logits, capacity, used_T=used_token, noise_TE=noise, picks_TE=picks), ep_group, sparse_routes
    )


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: comm.ProcessGroup | None = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> Gated:
    """Route each token to two experts; arguments as in `top1gating`.

    Args:
        logits: of the router, (T, E).
        capacity_factor: see `capacity_of`, with k = 2.
        min_capacity: see `capacity_of`.
        drop_tokens: drop what is beyond the capacity.
        ep_group: without `drop_tokens`, ranks that must agree on the capacity.
        top2_2nd_expert_sampling: the second expert is a sample of those left, in place of the best of them.
        sparse_routes: return indices in place of the two large tensors.
    """
    logits = at_least_fp32(logits)
    capacity = capacity_of(logits, capacity_factor, min_capacity, k=2) if drop_tokens else None
    noise = gumbel_like(logits) if top2_2nd_expert_sampling else None
    return _published(route_first_two(logits, capacity, noise_TE=noise), ep_group, sparse_routes, first_choices_first=True)


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: comm.ProcessGroup | None = None,
    drop_policy: DropPolicy = "probs",
    sparse_routes: bool = False,
) -> Gated:
    """Route each token to k experts; arguments as in `top1gating`.

    Args:
        logits: of the router, (T, E).
        k: experts per token.
        capacity_factor: see `capacity_of`.
        min_capacity: see `capacity_of`.
        drop_tokens: drop what is beyond the capacity.
        ep_group: without `drop_tokens`, ranks that must agree on the capacity.
        drop_policy: whom a full expert keeps, `"probs"` or `"position"`.
        sparse_routes: return indices in place of the two large tensors.

    Raises:
        ArgumentError: k outside 1 to E, or another policy.
    """
    logits = at_least_fp32(logits)
    capacity = capacity_of(logits, capacity_factor, min_capacity, k) if drop_tokens else None
    return _published(route_k(logits, k, capacity, drop_policy=drop_policy), ep_group, sparse_routes)


def _published(
    routing: Routing, ep_group: comm.ProcessGroup | None, sparse_routes: bool, first_choices_first: bool = False
) -> Gated:
    """The same routing in the published form; an expert's places go by token, or by choice and then token."""
    expert_KT, slot_KT = routing.expert_KT, routing.slot_KT
    experts, tokens = routing.kept_E.numel(), expert_KT.shape[1]
    capacity = routing.capacity
    if capacity is None:
        fullest = routing.exp_counts.max()
        if ep_group is not None:
            comm.all_reduce(fullest, comm.ReduceOp.MAX, group=ep_group)
        capacity = int(fullest)
    is_kept_KT = slot_KT < slot_KT.numel()
    index_KT = expert_KT.clamp(max=experts - 1)
    if first_choices_first:
        place_KT = slot_KT - (routing.kept_E.cumsum(0) - routing.kept_E)[index_KT]
    else:
        kept_TE = torch.zeros_like(routing.facts.probabilities_TE, dtype=torch.int64).scatter_add(
            1, index_KT.T, is_kept_KT.T.long()
        )
        place_KT = (kept_TE.cumsum(0) - 1).gather(1, index_KT.T).T
    if sparse_routes:
        found = (torch.where(is_kept_KT, expert_KT, -1).int(), torch.where(is_kept_KT, place_KT, 0).int())
        return routing.l_aux, capacity, experts, *found, routing.weight_KT, routing.exp_counts
    choice_R, token_R = is_kept_KT.nonzero(as_tuple=True)
    at = (token_R, expert_KT[choice_R, token_R], place_KT[choice_R, token_R])
    zeros_TEC = routing.weight_KT.new_zeros(tokens, experts, capacity)
    combine_TEC = zeros_TEC.index_put(at, routing.weight_KT[choice_R, token_R])
    mask_TEC = torch.zeros_like(zeros_TEC, dtype=torch.bool).index_put(at, torch.ones_like(token_R, dtype=torch.bool))
    return routing.l_aux, combine_TEC, mask_TEC, routing.exp_counts
