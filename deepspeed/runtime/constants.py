"""Door to the names and defaults of the top-level config keys, derived from the models."""

from __future__ import annotations

from deepspeed.config.constants import key_constants

globals().update(key_constants())
