"""Small parameters at ZeRO stage 3: whole on every rank, and for clients of one kind with the sharded ones.

    large      ds_persist False   data is empty between uses    held by `zero.coordinator`
    small      ds_persist True    data is always whole          held by `WholeParameters`, which has nothing to gather

Clients give `GatheredParameters` whatever a model has, edit on one rank, and count elements by `ds_numel`; which parameters
were small enough to stay whole (`stage3_param_persistence_threshold`) is none of their business. Called by the engine, for
the parameters that nobody else holds.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import torch
from torch import nn

from deepspeed import comm
from deepspeed.errors import ArgumentError
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.holder import holder_of, set_holder
from deepspeed.zero.published import publish, withdraw

__all__ = ["WholeParameters", "publish_small", "withdraw_small"]


class WholeParameters:
    """The protocol `zero.holder.ParameterHolder` over parameters that stay whole.

    Args:
        axis: the ranks that would share them if they were larger.
        is_expert: other ranks hold other experts in their place.
    """

    def __init__(self, axis: AxisGroup, *, is_expert: bool) -> None:
        self._axis = axis
        self._is_expert = is_expert

    def fetch(self, params: Sequence[nn.Parameter]) -> None:
        """Do nothing: they are whole."""

    def drop(self, params: Sequence[nn.Parameter]) -> None:
        """Do nothing: they stay whole."""

    def store(self, params: Sequence[nn.Parameter], source_rank: int) -> None:
        """Give all ranks of the axis the values of global rank `source_rank`; all of them call it.

        Written in place, so that an engine that trains them notices (`FlatGroup.edited`) and takes masters from them. Of
        experts that the rank does not hold, those of the first rank that does.

        Raises:
            ArgumentError: `source_rank` does not share the parameters.
        """
        ranks = self._axis.ranks
        if source_rank not in ranks and not self._is_expert:
            raise ArgumentError(
                f"modifier_rank={source_rank}, but the parameters are shared by the ranks {list(ranks)}. Name one of "
                "these: the global rank of the process that edits. With tensor-parallel ranks each has others: "
                "comm.get_global_rank(groups._get_data_parallel_group(), 0)."
            )
        source = ranks[0] if self._is_expert and source_rank not in ranks else source_rank
        with torch.no_grad():
            for param in params:
                values = param.detach().clone(memory_format=torch.contiguous_format)
                if self._axis.size > 1:
                    comm.broadcast(values, src=source, group=self._axis.group)
                param.copy_(values)  # a rank alone too: a write through `param.data` would pass unnoticed

    def publish(self, param: nn.Parameter) -> None:
        """Give `param` the attributes that clients read; this rank's share of it is all of it."""
        set_holder(param, self)
        group = self._axis.group if self._axis.size > 1 else None
        publish(param, param.shape, param.detach().reshape(-1), group=group, is_whole=True)


def publish_small(params: Iterable[nn.Parameter], holder: WholeParameters) -> None:
    """Let `holder` have those of `params` that nobody holds: the whole ones."""
    for param in params:
        if holder_of(param) is None and not nn.parameter.is_lazy(param) and not param.is_meta:
            holder.publish(param)


def withdraw_small(params: Iterable[nn.Parameter], of: Container[object] | None = None) -> None:
    """Undo `publish_small` where it was done, by whomever (None) or by one of these holders: a newer engine's stay."""
    for param in params:
        holder = holder_of(param)
        if isinstance(holder, WholeParameters) and (of is None or holder in of):
            set_holder(param, None)
            withdraw(param)
