"""What `deepspeed verify` asks of the ranks it starts, and the places where they leave their answers.

    deepspeed verify --- DEEPSPEED_VERIFY=JSON ---> deepspeed.initialize --> engine.recording
                     <--- <folder>/engine0-step1.safetensors, ... ----------'

Pure. Does not live here: the command (`verify`), the recording (`engine.recording`, below this room;
`deepspeed.initialize` hands it what it needs).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["VARIABLE", "Verification"]

VARIABLE = "DEEPSPEED_VERIFY"
"""Environment variable that carries a `Verification`."""


@dataclass(frozen=True)
class Verification:
    """One of the runs that are compared."""

    folder: str
    """Where rank 0 writes."""

    steps: int
    """After so many steps of an engine the script ends."""

    is_baseline: bool
    """Train at ZeRO stage 0, whatever the script's config says."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Verification | None:
        """What the variable says; None without it."""
        text = environ.get(VARIABLE)
        return cls(**json.loads(text)) if text else None

    def to_text(self) -> str:
        """The variable's value."""
        return json.dumps(asdict(self))

    def config(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The config to train with instead of `given`: the same, or with the whole block `zero_optimization` at stage 0."""
        return {**given, "zero_optimization": {"stage": 0}} if self.is_baseline else dict(given)

    def file(self, engine: int, step: int) -> Path:
        """Where the values after `step` of the script's engine number `engine` (from 0) belong; step 0: before the first."""
        return Path(self.folder) / f"engine{engine}-step{step}.safetensors"
