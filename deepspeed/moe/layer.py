"""`MoE`: a layer of many experts, of which each token sees k.

    hidden (..., M)
      |-- gate ----------- which experts, with which weights; l_aux, counts            moe.gate, moe.gating
      |-- to_rows -------- one row per kept (choice, token), sorted by expert          moe.dispatch
      |-- Exchange.there - to the ranks that hold the experts (ep_size > 1)
      |-- experts -------- each on its own stretch of rows                             moe.experts
      |-- Exchange.back
      `-- from_rows ------ per token the weighted sum
    output (..., M), l_aux, exp_counts                     with use_residual: mixed with a dense expert (PR-MoE)

Lives here: the public module and the one that moves tokens through it. Does not live here: averaging experts' gradients over
the ranks that hold the same (`engine`). Clients build `MoE`; `deepspeed.initialize` calls `set_deepspeed_parallelism`.

Sources: DeepSpeed-MoE (arXiv:2201.05596), section 4.1 for PR-MoE; docs/adr/0016.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.moe.dispatch import Exchange, Ways, from_rows, rows_of_experts, to_rows
from deepspeed.moe.experts import Experts, expert_group_name
from deepspeed.moe.gate import TopKGate
from deepspeed.moe.gating import Routing
from deepspeed.moe.remaking import remaking
from deepspeed.topology import groups
from deepspeed.topology.mesh import AxisGroup, ParallelMesh

__all__ = ["MOELayer", "MoE"]

_OTHER_AXES = ("pipe", "shard", "sequence", "tensor")


class MOELayer(nn.Module):
    """Moves tokens through a gate and experts.

    Args:
        gate: from (T, M) to a `Routing`, as `TopKGate`.
        experts: from (rows, rows of each expert) to rows, as `Experts`.
        ep_group_name: name of the ranks that the experts are spread over.
        ep_size: how many they are.
        num_local_experts: experts of each of them.
        use_tutel: no effect: rows are sorted here in any case.

    Attributes:
        l_aux: the load-balancing loss of the last forward, with its graph.
        exp_counts: tokens of this rank that chose each expert in the last forward.
        ep_group: the ranks, once `set_expert_axis` was called; None before, and with `ep_size=1`.
    """

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        ep_group_name: str | None,
        ep_size: int,
        num_local_experts: int,
        use_tutel: bool = False,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.ep_group_name = ep_group_name
        self.ep_size = ep_size
        self.num_local_experts = num_local_experts
        self.l_aux: Tensor | None = None
        self.exp_counts: Tensor | None = None
        self._axis: AxisGroup | None = None

    @property
    def ep_group(self) -> comm.ProcessGroup | None:
        """The ranks that the experts are spread over; None before they are known, and for one rank."""
        return self._axis.group if self._axis is not None and self.ep_size > 1 else None

    @property
    def expert_ranks(self) -> tuple[int, ...] | None:
        """Global ranks of `ep_group`; None before they are known."""
        return None if self._axis is None else self._axis.ranks

    def set_expert_axis(self, axis: AxisGroup) -> None:
        """Tell the ranks that the experts are spread over. Collective over them at the first layer.

        Raises:
            ArgumentError: they are not `ep_size`.
        """
        if axis.size != self.ep_size:
            raise ArgumentError(
                f"an expert axis of {axis.size} ranks for a layer with ep_size={self.ep_size}; they must agree."
            )
        self._axis = axis
        axis.hops()  # all ranks are here now; the groups are made once for all layers

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "l_aux": None, "exp_counts": None}  # a graph cannot be copied

    def forward(self, hidden: Tensor, used_token: Tensor | None = None) -> Tensor:
        """Return what the experts made of the tokens; every rank of the expert axis must call it.

        Args:
            hidden: (..., M), any number of tokens, also none.
            used_token: one element per token, 0 for those that go nowhere and come back as zeros.

        Raises:
            UsageError: experts are spread over ranks, and nobody said which.
        """
        hidden_TM = hidden.reshape(-1, hidden.shape[-1])
        routing: Routing = self.gate(hidden_TM, used_token)
        self.l_aux, self.exp_counts = routing.l_aux, routing.exp_counts
        output_TM = self._alone(hidden_TM, routing) if self.ep_size == 1 else self._spread(hidden_TM, routing)
        return output_TM.view(*hidden.shape[:-1], output_TM.shape[-1])

    def _alone(self, hidden_TM: Tensor, routing: Routing) -> Tensor:
        rows_per_expert = rows_of_experts(routing)
        ways = Ways(routing, sum(rows_per_expert))
        with remaking() as remade:
            rows_RM = remade.taken(to_rows(hidden_TM, ways), hidden_TM, ways.token_R)
            rows_RN = self.experts(rows_RM, rows_per_expert)
        return from_rows(rows_RN, routing.weight_KT, ways)

    def _spread(self, hidden_TM: Tensor, routing: Routing) -> Tensor:
        if self._axis is None:
            raise UsageError(
                f"experts are spread over ep_size={self.ep_size} ranks, and the layer was not told which. Give the model to "
                "deepspeed.initialize, or call set_deepspeed_parallelism() of the MoE, on all ranks, before forward."
            )
        exchange = Exchange(self._axis, routing, self.num_local_experts)
        ways = Ways(routing, exchange.leaving_rows, gradient_factor=self.ep_size)
        arrived_XM = exchange.there(to_rows(hidden_TM, ways))
        with remaking():
            rows_XN = self.experts(arrived_XM, exchange.rows_per_expert)
        returned_RN = exchange.back(rows_XN)
        return from_rows(returned_RN, routing.weight_KT, ways)


class MoE(nn.Module):
    """A layer of experts in place of one feed-forward block.

    Args:
        hidden_size: width M of the tokens.
        expert: the module that is copied for each expert, from (rows, M) to (rows, M).
        num_experts: experts of the whole layer.
        ep_size: ranks that they are spread over; each holds `num_experts / ep_size`.
        k: experts that each token sees.
        capacity_factor: while training, an expert takes `ceil(tokens / num_experts * capacity_factor * k)` rows of a rank's
            tokens at most, but no fewer than `min_capacity`.
        eval_capacity_factor: the same in eval mode.
        min_capacity: see `capacity_factor`.
        use_residual: every token also goes through one dense expert; a learnt pair of coefficients mixes the two (PR-MoE).
        noisy_gate_policy: None, `"Jitter"` or `"RSample"`; see `TopKGate`.
        drop_tokens: drop what is beyond the capacity; a dropped token gets zeros from that expert. False: keep all.
        use_rts: with k = 1, a full expert keeps tokens drawn at random while training, in place of the first ones.
        use_tutel: accepted; rows are sorted by expert in any case, which is what Tutel brings.
        enable_expert_tensor_parallelism: accepted; experts whose layers hold parts of matrices are told by the layers
            themselves (AutoTP's, or Megatron-style marks on parameters), and all tensor-parallel ranks see every token.
        top2_2nd_expert_sampling: with k = 2, the second expert is a sample, while training.
        z_loss_weight: this times the router z-loss (ST-MoE, arXiv:2202.08906) is added to `l_aux`; ours. About 0.1 with a
            factor of 0.01 on `l_aux`.

    Attributes:
        num_local_experts: experts of each rank.
        expert_group_name: `"ep_size_<n>"`.

    Raises:
        ArgumentError: `num_experts` does not divide over `ep_size` ranks, k is outside 1 to `num_experts`, or the policy is
            unknown.
    """

    is_deepspeed_moe_layer = True
    """What `has_moe_layers` and the engine ask; other libraries' modules have an `is_moe_layer` of another meaning."""

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
        z_loss_weight: float = 0.0,
    ) -> None:
        super().__init__()
        if ep_size < 1 or num_experts < 1 or num_experts % ep_size:
            raise ArgumentError(
                f"num_experts={num_experts} over ep_size={ep_size} ranks: each rank holds the same number, at least 1. "
                "Choose an ep_size that divides num_experts."
            )
        self.num_experts = num_experts
        self.ep_size = ep_size
        self.num_local_experts = num_experts // ep_size
        self.expert_group_name = expert_group_name(ep_size)
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            top2_2nd_expert_sampling=top2_2nd_expert_sampling,
            z_loss_weight=z_loss_weight,
        )
        experts = Experts(expert, self.num_local_experts, self.expert_group_name)
        self.deepspeed_moe = MOELayer(gate, experts, self.expert_group_name, ep_size, self.num_local_experts, use_tutel)
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)
        if groups.has_current() and groups.get_current().sizes["expert"] == ep_size:
            self.set_deepspeed_parallelism()  # experts have their names at once, for a state dict that is loaded now

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Find the ranks that the experts are spread over, and name this rank's experts; every rank must call it.

        They are the expert axis of the current mesh if that has `ep_size` ranks; else a mesh with such an axis becomes the
        current one: its other axes are those of the mesh that was, or all ranks see different data. With `ep_size=1` neither
        is needed, nor a process group. May be called again.

        Args:
            use_data_before_expert_parallel_: where a mesh is made, neighbours in rank hold the same experts, in place of
                different ones.

        Raises:
            ArgumentError: `ep_size` does not divide the number of data-parallel ranks.
            CommError: there is no process group.
            UsageError: experts were loaded for an axis of other ranks.
        """
        if self.ep_size == 1:
            return
        mesh = self._mesh(use_data_before_expert_parallel_)
        axis, experts = mesh.axis("expert"), cast("Experts", self.deepspeed_moe.experts)
        self._refuse_other_ranks(axis, experts)
        self.deepspeed_moe.set_expert_axis(axis)
        experts.place(axis.rank)

    def _refuse_other_ranks(self, axis: AxisGroup, experts: Experts) -> None:
        """Loaded experts keep their numbers. Groups that are cut otherwise differ on every rank, so all of them raise."""
        before = self.deepspeed_moe.expert_ranks
        if experts.deepspeed_experts.is_loaded and before not in (None, axis.ranks):
            raise UsageError(
                f"experts were loaded for a layer that spreads them over ranks {before}; now these are {axis.ranks}, and "
                "ranks would hold others under the same numbers. Load weights after deepspeed.initialize, or give "
                "set_deepspeed_parallelism the order of the config (use_data_before_expert_parallelism)."
            )

    def _mesh(self, use_data_before_expert_parallel_: bool) -> ParallelMesh:
        current = groups.get_current() if groups.has_current() else None
        if current is not None and current.sizes["expert"] == self.ep_size:
            return current
        if current is None or current.sizes["expert"] > 1:
            current = ParallelMesh.build(**({} if current is None else {axis: current.sizes[axis] for axis in _OTHER_AXES}))
        current = current.with_experts(self.ep_size, is_slowest=use_data_before_expert_parallel_)
        groups.set_current(current)
        return current

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return `(output, l_aux, exp_counts)`; every rank of the expert axis must call it.

        Args:
            hidden_states: (..., hidden_size), any number of tokens, also none.
            used_token: one element per token, 0 for those that go to no expert.

        Returns:
            The output, shaped as the input; the load-balancing loss of this rank's tokens, to be added to the loss with a
            factor such as 0.01; the number of this rank's tokens that chose each expert, dropped ones included.

        Raises:
            UsageError: `ep_size > 1` and nobody called `set_deepspeed_parallelism`.
        """
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            dense = self.mlp(hidden_states)
            dense = dense[0] if isinstance(dense, tuple) else dense
            share = torch.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * share[..., 0:1] + dense * share[..., 1:]
        l_aux, exp_counts = self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts
        assert l_aux is not None  # set by the forward above
        assert exp_counts is not None
        return output, l_aux, exp_counts
