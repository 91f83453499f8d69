"""A small model whose layers may be cut over tensor-parallel ranks, written out by hand: no line of `tensor_parallel`.

norm (whole) -> up (columns) + shared (every rank has a copy) -> tanh -> down (rows, summed over ranks) + bias (whole)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.sharding import Cut, Span
from tests.support.models import Batch, TinyModel


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Middle(nn.Module):
    """The part that is cut."""

    cut_axis: str | None = None

    def __init__(self, values: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(hidden, values) / values**0.5)
        self.shared = nn.Parameter(torch.randn(1, values) / values**0.5)
        self.down = nn.Parameter(torch.randn(values, hidden) / hidden**0.5)
        self.bias = nn.Parameter(torch.zeros(values))
        self.group: Any = None
        self._cuts: dict[str, Cut] = {}

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        """What is a part, and of what."""
        yield from self._cuts.items()

    def cut(self, rank: int, size: int, group: Any) -> None:
        """Keep the part of `rank`; the widths differ."""
        hidden, values = self.up.shape
        widths = [hidden // size + (place < hidden % size) for place in range(size)]
        everyone = tuple((Span(0, 1),) for _ in range(size))
        self._cuts = {
            "up": Cut.of_widths((hidden, values), 0, widths),
            "shared": Cut((1, values), 0, everyone),
            "down": Cut.of_widths((values, hidden), 1, widths),
        }
        start, width = sum(widths[:rank]), widths[rank]
        self.up = nn.Parameter(self.up.detach()[start : start + width].clone())
        self.down = nn.Parameter(self.down.detach()[:, start : start + width].clone())
        self.group, self.cut_axis = group, "tensor"

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared
        if self.group is not None:
            x, shared = _CopyIn.apply(x, self.group), _CopyIn.apply(shared, self.group)
        out = F.linear(torch.tanh(F.linear(x, self.up) + F.linear(x, shared)), self.down)
        return (out if self.group is None else _SumOut.apply(out, self.group)) + self.bias


class CutNet(TinyModel):
    """Whole until `cut`."""

    def __init__(self, hidden: int = 9) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(self.VALUES)
        self.first, self.second = Middle(self.VALUES, hidden), Middle(self.VALUES, hidden)

    def cut(self, rank: int, size: int, group: Any) -> CutNet:
        """Keep the part of a tensor-parallel rank."""
        for middle in (self.first, self.second):
            middle.cut(rank, size, group)
        return self

    def batch(self, rows: int, seed: int) -> Batch:
        """Inputs and targets."""
        return self._regression(rows, torch.Generator().manual_seed(seed))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        return F.mse_loss(self.second(self.first(self.norm(inputs))), targets)


def cut_net(dtype: torch.dtype = torch.float64) -> CutNet:
    """Equal calls give equal models."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return CutNet().to(dtype)


def part_of(cut: Cut, rank: int, whole: Tensor) -> Tensor:
    """What a rank holds of a whole tensor."""
    return torch.cat([whole.narrow(cut.dim, span.start, span.length) for span in cut.parts[rank]], cut.dim)


class TensorUnit:
    """A model-parallel unit: neighbours are tensor-parallel, the others data-parallel."""

    def __init__(self, tensor: int) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self._sizes = (tensor, world_size // tensor)
        groups = [range(start, start + tensor) for start in range(0, world_size, tensor)]
        self._tensor = [dist.new_group(list(ranks)) for ranks in groups][rank // tensor]
        strides = [range(first, world_size, tensor) for first in range(tensor)]
        self._data = [dist.new_group(list(ranks)) for ranks in strides][rank % tensor]

    def get_model_parallel_group(self) -> Any:
        return self._tensor

    def get_model_parallel_world_size(self) -> int:
        return self._sizes[0]

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank() % self._sizes[0]

    def get_data_parallel_group(self) -> Any:
        return self._data

    def get_data_parallel_world_size(self) -> int:
        return self._sizes[1]

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() // self._sizes[0]


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """How each parameter of which tensor-parallel ranks have parts is cut, by name."""
    return {
        f"{name}.{key}" if name else key: cut
        for name, module in model.named_modules(remove_duplicate=False)
        if getattr(module, "cut_axis", None) == "tensor"
        for key, cut in cast("Any", module).cuts()
    }
