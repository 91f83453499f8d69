"""The router: one matrix of hidden size x experts, and the choice made from its logits.

Lives here: the parameters and the settings of a gate. Does not live here: the choice itself (`moe.gating`, pure).
`moe.layer` calls it once per forward.

The router computes in fp32 whatever the model's precision (float64 in a float64 model): a rounded logit sends a token to
another expert (Switch, arXiv:2101.03961, section 2.4).
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.comm import ProcessGroup
from deepspeed.common.logging import warn_once
from deepspeed.errors import ArgumentError
from deepspeed.moe.gating import (
    Routing,
    RoutingFacts,
    at_least_fp32,
    capacity_of,
    route_first,
    route_first_two,
    route_k,
    z_loss_of,
)
from deepspeed.moe.noise import gumbel_like, jitter, uniform_like

__all__ = ["NOISE_POLICIES", "TopKGate"]

NOISE_POLICIES = (None, "Jitter", "RSample")


class RouterLinear(nn.Linear):
    """A linear layer that computes in at least fp32."""

    def forward(self, input: Tensor) -> Tensor:
        """Logits (T, E) of tokens (T, M)."""
        return F.linear(input, at_least_fp32(self.weight))


class TopKGate(nn.Module):
    """Chooses k experts for each token.

    Args:
        model_dim: hidden size.
        num_experts: experts of the whole layer.
        k: experts per token.
        capacity_factor: of `capacity_of`, while training.
        eval_capacity_factor: of `capacity_of`, in eval mode.
        min_capacity: of `capacity_of`.
        noisy_gate_policy: `"Jitter"` multiplies the router's input by noise of 1 %; `"RSample"` (k = 1) samples the expert
            from the router's probabilities. Both while training only.
        drop_tokens: drop what is beyond the capacity; False: nothing is dropped, and the capacity means nothing.
        use_rts: with k = 1, a full expert keeps tokens drawn at random while training, in place of the first ones.
        ep_group: ranks that experts are spread over; not needed here, kept for callers that read it.
        top2_2nd_expert_sampling: with k = 2, the second expert is a sample, while training.
        z_loss_weight: this times the router z-loss (ST-MoE) is added to `l_aux`; ours.

    Attributes:
        wg: the router's matrix, fp32.
        last_facts: what the last routing came to, without a graph; None before the first. For monitors.

    Raises:
        ArgumentError: k is outside 1 to `num_experts`, or the policy is unknown.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: ProcessGroup | None = None,
        top2_2nd_expert_sampling: bool = True,
        z_loss_weight: float = 0.0,
    ) -> None:
        super().__init__()
        if not 1 <= k <= num_experts:
            raise ArgumentError(f"k={k} of num_experts={num_experts}: a token goes to 1 to {num_experts} experts. Lower k.")
        if noisy_gate_policy not in NOISE_POLICIES:
            raise ArgumentError(f'noisy_gate_policy={noisy_gate_policy!r}: it is None, "Jitter" or "RSample".')
        if noisy_gate_policy == "RSample" and k > 1:
            warn_once(
                __name__,
                f'noisy_gate_policy="RSample" has no effect with k={k}: it samples the one expert of k=1. '
                'Use "Jitter", or leave it out.',
            )
        self.wg = RouterLinear(model_dim, num_experts, bias=False).float()
        self.ep_group = ep_group
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = noisy_gate_policy
        self.drop_tokens = drop_tokens
        self.use_rts = use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling
        self.z_loss_weight = z_loss_weight
        self.last_facts: RoutingFacts | None = None

    def forward(self, hidden_TM: Tensor, used_token: Tensor | None = None) -> Routing:
        """Route tokens; no rank waits for another.

        Args:
            hidden_TM: one row per token; any number of rows.
            used_token: (T,) in any shape, 0 for tokens that go nowhere.

        Raises:
            ArgumentError: `used_token` has another number of elements than there are tokens.
        """
        with torch.autocast(hidden_TM.device.type, enabled=False):
            hidden_TM = at_least_fp32(hidden_TM)
            if self.training and self.noisy_gate_policy == "Jitter":
                hidden_TM = jitter(hidden_TM)
            logits_TE = self.wg(hidden_TM)
            routing = self._route(logits_TE, used_token)
            if self.z_loss_weight:
                l_aux = routing.l_aux + self.z_loss_weight * z_loss_of(logits_TE)
                routing = dataclasses.replace(routing, l_aux=l_aux)
        self.last_facts = routing.facts
        return routing

    def _route(self, logits_TE: Tensor, used_token: Tensor | None) -> Routing:
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        capacity = capacity_of(logits_TE, factor, self.min_capacity, self.k) if self.drop_tokens else None
        if self.k == 1:
            samples = self.training and self.noisy_gate_policy == "RSample"
            noise_TE = gumbel_like(logits_TE) if samples else None
            picks_TE = uniform_like(logits_TE) if self.training and self.use_rts and self.drop_tokens else None
            return route_first(logits_TE, capacity, used_T=used_token, noise_TE=noise_TE, picks_TE=picks_TE)
        if self.k == 2:
            noise_TE = gumbel_like(logits_TE) if self.training and self.top2_2nd_expert_sampling else None
            return route_first_two(logits_TE, capacity, used_T=used_token, noise_TE=noise_TE)
        return route_k(logits_TE, self.k, capacity, used_T=used_token)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"k={self.k}, drop_tokens={self.drop_tokens}"
