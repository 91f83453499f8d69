"""Door to `deepspeed.checkpointing`: the same module object, because libraries keep it and set names on it."""

from __future__ import annotations

import sys

from deepspeed.activations import checkpointing

sys.modules[__name__] = checkpointing
