"""The original's universal folder, as a `CheckpointSource`.

    tag_universal/
      mp_rank_MM_model_states.pt  (or zero_pp_rank_D_mp_rank_MM_...)     --> counters, schedule, client state, shapes, ties
      zero/optimizer_state.pt                                            --> hyperparameters, loss scale, step
      zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt                 --> master/<p>, optimizer/<p>/<key>, scalars

Does not live here: unpickling (`archive`), the grammar of file names (`files`), writing (`to_universal`). Called by `opening`.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.agreement import Ranks
from deepspeed.checkpoint.source import EngineState

__all__ = ["UniversalSource"]


class UniversalSource:
    """A universal folder of the original. Every rank opens it; files are mapped, and only what is read costs memory."""

    def __init__(self, folder: Path, tag: str, ranks: Ranks) -> None:
        self.folder = folder
        self.tag = tag
        self._ranks = ranks

    @cached_property
    def state(self) -> EngineState:
        """What the engine stored besides tensors."""
        raise NotImplementedError

    def client_state(self) -> dict[str, Any]:
        """What the user stored, anew at each call."""
        raise NotImplementedError

    def rank_state(self, rank: int) -> dict[str, Any]:
        """Nothing: this layout stores no state per rank."""
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
        """Read elements `[start, start + length)` of the flattened tensor."""
        raise NotImplementedError

    def check_own_share(self) -> None:
        """Compare this rank's share of the files with the checksums that the archives hold. Not collective."""
        raise NotImplementedError
