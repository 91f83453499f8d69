"""Top-level config keys and their defaults as upper-case constants, which older code imports.

Derived from `DeepSpeedConfig`, so there is nothing here to keep up to date.

Called by the door `deepspeed.runtime.constants` alone.
"""

from __future__ import annotations

from deepspeed.config.blocks import blocks_of
from deepspeed.config.root import DeepSpeedConfig

__all__ = ["key_constants"]


def key_constants() -> dict[str, object]:
    """Return `TRAIN_BATCH_SIZE: "train_batch_size"` and `TRAIN_BATCH_SIZE_DEFAULT: None`, and so on for each key.

    A key whose default is made anew for each config (a block) has no `_DEFAULT`.
    """
    constants: dict[str, object] = {}
    constants |= {name.upper(): name for name in blocks_of(DeepSpeedConfig)}
    for key, info in DeepSpeedConfig.model_fields.items():
        constants[key.upper()] = key
        if not info.is_required() and info.default_factory is None:
            constants[f"{key.upper()}_DEFAULT"] = info.default
    return constants
