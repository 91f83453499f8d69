"""Which layout a tag's folder has, told by its file names alone.

Does not live here: reading (`opening`). Called by `opening`, `tags` and the tools.
"""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path

from deepspeed.checkpoint.disk.names import MANIFEST_FILE

__all__ = ["Layout", "layout_of"]

_MODEL_FILE = re.compile(r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt|layer_\d+(-model_\d+)?-model_states\.pt")
_UNIVERSAL_FOLDER = "zero"


class Layout(Enum):
    """How a checkpoint lies on the disk."""

    OURS = "deepspeed-checkpoint"
    """`manifest.json` and safetensors."""

    STAGES = "stage files"
    """The original's `.pt` files, one per rank and kind."""

    UNIVERSAL = "universal"
    """The original's universal folder: one folder per parameter."""


def layout_of(folder: Path) -> Layout | None:
    """Layout of the folder of one tag; None when it is none that can be read."""
    if (folder / MANIFEST_FILE).is_file():
        return Layout.OURS
    if not folder.is_dir() or not any(_MODEL_FILE.fullmatch(path.name) for path in folder.iterdir()):
        return None
    return Layout.UNIVERSAL if (folder / _UNIVERSAL_FOLDER).is_dir() else Layout.STAGES
