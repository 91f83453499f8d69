"""Door and command: fp32 weights out of a checkpoint, as tensors or as files.

    python -m deepspeed.utils.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR [--max_shard_size 5GB] [--safe_serialization]

Names are loaded when first used, so that the command does not load torch for them. `docs/guide/export.md` tells the rest.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from deepspeed.checkpoint.export.consolidate import zero_to_fp32 as main
from deepspeed.common.lazy import attach

if TYPE_CHECKING:
    from deepspeed.checkpoint.export.client_files import get_model_state_file, get_optim_files
    from deepspeed.checkpoint.export.full_state import (
        convert_zero_checkpoint_to_fp32_state_dict,
        convert_zero_checkpoint_to_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "main",
]

_FULL_STATE = (
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
)
_CLIENT_FILES = ("get_model_state_file", "get_optim_files")

__getattr__, __dir__ = attach(
    __name__,
    names={name: f"deepspeed.checkpoint.export.full_state:{name}" for name in _FULL_STATE}
    | {name: f"deepspeed.checkpoint.export.client_files:{name}" for name in _CLIENT_FILES},
)

if __name__ == "__main__":
    sys.exit(main())
