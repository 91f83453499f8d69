"""A checkpoint source out of plain values, for tests of what is made from one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from deepspeed.checkpoint.source import CheckpointSource, EngineState

SCALED = {"scale": 2.0**12, "hysteresis_left": 1, "good_steps": 17}


def trained_state(members: list[list[str]], **changes: Any) -> EngineState:
    """State of an engine with Adam after three steps of two micro-batches on two ranks."""
    names = [name for group in members for name in group]
    state = {
        "global_steps": 3,
        "global_samples": 24,
        "skipped_steps": 1,
        "micro_steps": 6,
        "dp_world_size": 2,
        "zero_stage": 2,
        "ds_config": {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 2},
        },
        "shared_parameters": {},
        "frozen_parameters": [],
        "has_frozen_parameters": True,
        "buffers": [],
        "optimizer": {
            "name": "AdamW",
            "groups": [{"lr": 0.1 * (number + 1), "betas": (0.9, 0.95)} for number in range(len(members))],
            "members": members,
            "scalars": {name: {"step": 3.0} for name in names},
        },
        "loss_scaler": {},
        "extra_state": {},
        "lr_scheduler": {"last_batch_iteration": 2},
        "data": None,
        **changes,
    }
    return cast("EngineState", state)


class PlainSource:
    """Tensors by name, a state and a client state; remembers the longest range that was read."""

    def __init__(
        self, folder: Path, tensors: dict[str, Tensor], state: EngineState, client: dict[str, Any] | None = None
    ) -> None:
        self.folder = folder
        self.tag = folder.name
        self.state = state
        self.longest_read = 0
        self._tensors = tensors
        self._client = client or {}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").touch()

    def with_members(self, members: Sequence[Sequence[str]]) -> CheckpointSource:
        return self

    def client_state(self) -> dict[str, Any]:
        return dict(self._client)

    def rank_state(self, rank: int) -> dict[str, Any]:
        return {}

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._tensors if name.startswith(prefix))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str, start: int = 0, length: int | None = None, out: Tensor | None = None) -> Tensor:
        flat = self._tensors[name].reshape(-1)
        if out is None:
            out = torch.empty(flat.numel() - start if length is None else length, dtype=flat.dtype)
        self.longest_read = max(self.longest_read, out.numel())
        return out.copy_(flat[start : start + out.numel()])

    def cut(self, name: str) -> None:
        return None

    def read_stored(self, name: str, start: int, out: Tensor) -> Tensor:
        return self.read(name, start, out=out)

    def check_own_share(self) -> None:
        return None


def contents(source: CheckpointSource) -> dict[str, Tensor]:
    """Every tensor of a source, in its shape."""
    return {name: source.read(name).view(source.shape(name)) for name in source.names()}


def trained_tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Masters and moments of parameters, all elements different."""
    tensors: dict[str, Tensor] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) / 7 + 1000 * number
        tensors |= {
            f"master/{name}": values,
            f"optimizer/{name}/exp_avg": -values,
            f"optimizer/{name}/exp_avg_sq": values**2,
        }
    return tensors
