"""Stage files of the original as a `CheckpointSource`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.agreement import Ranks
from deepspeed.checkpoint.source import EngineState
from deepspeed.errors import CheckpointError

__all__ = ["StageSource"]


class StageSource:
    """Stage files of the original, open for reading; see `CheckpointSource`."""

    def __init__(self, folder: Path, tag: str, ranks: Ranks) -> None:
        self.folder = folder
        self.tag = tag
        raise CheckpointError(f"{folder} holds stage files of the original, which this version does not read yet.")

    @property
    def state(self) -> EngineState:
        """What the engine stored besides tensors."""
        raise NotImplementedError

    def client_state(self) -> dict[str, Any]:
        """What the user stored."""
        raise NotImplementedError

    def rank_state(self, rank: int) -> dict[str, Any]:
        """Nothing: the original stores no state per rank that is ours to restore."""
        return {}

    def names(self, prefix: str = "") -> list[str]:
        """Names of all tensors that start with `prefix`, sorted."""
        raise NotImplementedError

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of a tensor."""
        raise NotImplementedError

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a tensor on the disk."""
        raise NotImplementedError

    def read(self, name: str, start: int = 0, length: int | None = None, out: Tensor | None = None) -> Tensor:
        """Read a range of a flattened tensor."""
        raise NotImplementedError

    def check_own_share(self) -> None:
        """Check this rank's share of the files."""
        raise NotImplementedError
