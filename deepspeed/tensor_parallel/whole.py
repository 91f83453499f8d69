"""Whole parameters out of the parts that ranks hold, for code that reads or sets them.

Lives here: gathering one, and the context in which a layer's parameters are whole. Does not live here: checkpoints, which
never gather (`checkpoint`).
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.sharding.cut import Cut
from deepspeed.tensor_parallel.layers import CutLayer, part_of
from deepspeed.topology.mesh import AxisGroup

__all__ = ["GatherReplacedLayerParams", "whole_of"]


def whole_of(part: Tensor, cut: Cut, axis: AxisGroup) -> Tensor:
    """The whole tensor, on every rank of the axis; they all call it. Parts travel padded to the largest."""
    numels = [cut.part_shape(rank) for rank in range(cut.ranks)]
    largest = max(torch.Size(shape).numel() for shape in numels)
    padded = part.new_zeros(largest)
    padded[: part.numel()].copy_(part.detach().reshape(-1))
    parts = [torch.empty_like(padded) for _ in numels]
    comm.all_gather(parts, padded, group=axis.group)
    whole = part.new_empty(cut.shape)
    for rank, shape in enumerate(numels):
        held, at = parts[rank][: torch.Size(shape).numel()].view(shape), 0
        for span in cut.parts[rank]:
            whole.narrow(cut.dim, *span).copy_(held.narrow(cut.dim, at, span.length))
            at += span.length
    return whole


class GatherReplacedLayerParams:
    """Within it, parameters of a layer that is cut are whole on every rank; afterwards each rank keeps its part again.

    Changes made to a whole parameter inside remain, if all ranks make them. Collective over the tensor axis. Where ZeRO
    stage 3 shards the parameters, enter `deepspeed.zero.GatheredParameters` first.
    """

    def __init__(self, params: Iterable[nn.Parameter] | nn.Parameter, module: nn.Module, enabled: bool = True) -> None:
        """Take the parameters that `module` cuts; nothing is done for others, or unless `enabled`."""
        wanted = {id(param) for param in ([params] if isinstance(params, Tensor) else params)}
        self._layer = module if isinstance(module, CutLayer) else None
        self._cut: list[tuple[nn.Parameter, Cut, Tensor]] = []
        for name, cut in self._layer.cuts() if self._layer is not None and enabled else ():
            param = getattr(module, name)
            if id(param) in wanted:
                self._cut.append((param, cut, param.data))

    def __enter__(self) -> None:
        """Gather.

        Raises:
            UsageError: ZeRO stage 3 has this rank's part sharded.
        """
        if self._layer is not None:
            for _, cut, part in self._cut:
                given, needed = tuple(part.shape), cut.part_shape(self._layer.axis.rank)
                if given != needed:
                    raise UsageError(
                        f"GatherReplacedLayerParams: a parameter of {type(self._layer).__name__} has shape {given} here, "
                        f"and this rank's part has {needed}: ZeRO stage 3 shards it. Enter "
                        "deepspeed.zero.GatheredParameters([...]) with the same parameters around it."
                    )
            for param, cut, part in self._cut:
                param.data = whole_of(part, cut, self._layer.axis)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take the parts again."""
        if self._layer is not None:
            for param, cut, part in self._cut:
                own = part_of(param.data, cut, self._layer.axis.rank)
                param.data = part
                if not torch.equal(own, part):
                    with torch.no_grad():
                        param.copy_(own)  # not through `data`: an engine notices it, and its master follows
