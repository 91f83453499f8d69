"""A small checkpoint with every kind of weight, and what its state dict must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.checkpoint import Piece
from tests.support.checkpoints import write_checkpoint
from tests.unit.checkpoint.tool_checkpoints import STATE


class Net(nn.Module):
    """Tied and frozen weights, buffers of all kinds, a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.emb = nn.Embedding(5, 4)
        self.fc = nn.Linear(4, 3)
        self.frozen = nn.Linear(4, 3, bias=False).requires_grad_(False)
        self.also_frozen = nn.Linear(4, 3, bias=False)
        self.also_frozen.weight = self.frozen.weight
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.emb.weight
        self.none = nn.Parameter(torch.empty(0, 2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


TIED = {"also_frozen.weight": "frozen.weight", "head.weight": "emb.weight"}
FROZEN = ["frozen.weight"]
BUFFERS = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def save_net(
    folder: Path,
    tag: str = "t",
    *,
    extra: dict[str, Tensor] | None = None,
    client_state: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Tensor]:
    """Save `Net` as bf16 training would: fp32 masters, bf16 frozen weights and buffers. Return the fp32 state dict.

    `extra` are further trained weights, which the returned dict does not hold; `changes` go into the engine's state.
    """
    net = Net()
    tensors: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for name, value in net.state_dict().items():
        is_trained = name not in BUFFERS and TIED.get(name, name) not in FROZEN
        kept = value if is_trained or not value.is_floating_point() else value.bfloat16()
        if name not in TIED:
            tensors[f"master/{name}" if is_trained else f"module/{name}"] = kept
        expected[name] = kept.float() if kept.is_floating_point() else kept
    trained = [name.removeprefix("master/") for name in tensors if name.startswith("master/")]
    tensors |= {f"master/{name}": value for name, value in (extra or {}).items()}
    if not changes.get("has_frozen_parameters", True):
        tensors = {name: value for name, value in tensors.items() if name.removeprefix("module/") not in FROZEN}
    state = {
        **STATE,
        "shared_parameters": TIED,
        "frozen_parameters": FROZEN,
        "buffers": BUFFERS,
        "optimizer": {"name": "AdamW", "groups": [{}, {}], "members": [trained[1:], trained[:1]], "scalars": {}},
        **changes,
    }
    pieces = [Piece.whole(name, tensor) for name, tensor in tensors.items()]
    write_checkpoint(folder, tag, pieces, state, client_state or {}, rank=0, world_size=1)
    return expected
