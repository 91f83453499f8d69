"""Tiny models with layers of experts, equal on all ranks whatever ranks hold which expert.

Routing has no randomness and drops nothing, so that a rank's tokens go where they would go in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE
from tests.support.models import Model, TinyModel, build

WIDTH = 6
AUX_WEIGHT = 0.01
PLAIN: dict[str, Any] = {"drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False}


class Expert(nn.Module):
    """Two linear layers, with a buffer that a checkpoint holds."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width + 3), nn.Linear(width + 3, width)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.seen += len(rows)
        hidden: Tensor = self.down(torch.tanh(self.up(rows)))
        return hidden


class MoeNet(TinyModel):
    """Linear, layers of experts around residuals, linear; the loss has the load-balancing one in it.

    Args:
        experts: number of experts of each layer.
        ep_size: ranks that they are spread over.
        k: experts of a token.
        options: further arguments of `MoE`.
    """

    def __init__(self, experts: Sequence[int] = (4,), ep_size: int = 1, k: int = 1, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(self.VALUES, WIDTH)
        self.layers = nn.ModuleList(
            MoE(WIDTH, Expert(), num_experts=count, ep_size=ep_size, k=k, **{**PLAIN, **options}) for count in experts
        )
        self.last = nn.Linear(WIDTH, self.VALUES)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.first(inputs)
        losses = []
        for layer in self.layers:
            out, l_aux, _ = layer(torch.tanh(hidden))
            hidden = hidden + out
            losses.append(l_aux)
        return F.mse_loss(self.last(hidden), targets) + AUX_WEIGHT * torch.stack(losses).sum().to(hidden.dtype)


def moe_net(experts: Sequence[int] = (4,), ep_size: int = 1, dtype: torch.dtype = torch.float64, **options: Any) -> MoeNet:
    """`MoeNet` with values that depend on the name of each parameter alone; experts differ."""

    def make() -> MoeNet:
        return MoeNet(experts, ep_size, **options)

    model = build(make)
    place(model)
    return fill(model, dtype)


def place(model: nn.Module) -> None:
    """Name experts for this rank, as `deepspeed.initialize` will, so that values may depend on names before."""
    for layer in model.modules():
        if isinstance(layer, MoE) and layer.ep_size > 1:
            experts = cast("Experts", layer.deepspeed_moe.experts)
            experts.place(comm.get_rank() % layer.ep_size)


def fill(model: Model, dtype: torch.dtype) -> Model:
    """Values out of names."""
    model.to(dtype)
    with torch.no_grad():
        for name, param in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(ord(letter) * 31**i for i, letter in enumerate(name)) % (1 << 31))
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model
