"""Small checkpoints for the tests of `deepspeed-checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint import Piece
from tests.support.checkpoints import write_checkpoint

STATE: dict[str, Any] = {
    "global_steps": 3,
    "global_samples": 12,
    "skipped_steps": 0,
    "micro_steps": 3,
    "dp_world_size": 1,
    "zero_stage": 1,
    "ds_config": {"bf16": {"enabled": True}},
    "shared_parameters": {"head": "w"},
    "frozen_parameters": [],
    "has_frozen_parameters": True,
    "buffers": ["seen"],
    "optimizer": {"name": "AdamW", "groups": [{"lr": 0.1}], "members": [["w"]], "scalars": {"w": {"step": 3}}},
    "loss_scaler": {"scale": 1.0},
    "extra_state": {},
    "lr_scheduler": {"last_batch_iteration": 2},
    "data": None,
}


def save(folder: Path, tag: str, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """A whole checkpoint of one rank: a master weight, a buffer and a moment, with `tensors` put in their place."""
    client_state = changes.pop("client_state", {"epoch": 7})
    rank_state = changes.pop("rank_state", {"torch": torch.arange(4, dtype=torch.uint8)})
    content = {
        "master/w": torch.arange(6.0).view(2, 3),
        "module/seen": torch.ones(3, dtype=torch.bfloat16),
        "optimizer/w/exp_avg": torch.full((2, 3), 0.5),
        **(tensors or {}),
    }
    pieces = [Piece.whole(name, tensor) for name, tensor in content.items()]
    state = {**STATE, **changes}
    return write_checkpoint(folder, tag, pieces, state, client_state, rank=0, world_size=1, rank_state=rank_state)
