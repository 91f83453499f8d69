"""Door and command: weights in a chosen type out of a checkpoint, as tensors or as files.

    python -m deepspeed.utils.zero_to_torch CHECKPOINT_DIR OUTPUT_DIR --dtype bf16 [--max_shard_size 5GB]

Names are loaded when first used, so that the command does not load torch for them. `docs/guide/export.md` tells the rest.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from deepspeed.checkpoint.export.consolidate import zero_to_torch as main
from deepspeed.common.lazy import attach

if TYPE_CHECKING:
    from deepspeed.checkpoint.export.full_state import convert_zero_checkpoint_to_state_dict

__all__ = [
    "convert_zero_checkpoint_to_state_dict",
    "main",
]

__getattr__, __dir__ = attach(
    __name__,
    names={
        "convert_zero_checkpoint_to_state_dict": (
            "deepspeed.checkpoint.export.full_state:convert_zero_checkpoint_to_state_dict"
        ),
    },
)

if __name__ == "__main__":
    sys.exit(main())
