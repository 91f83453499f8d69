"""Door to `deepspeed.topology.groups`: the same module object, because libraries replace functions on it."""

from __future__ import annotations

import sys

from deepspeed.topology import groups

sys.modules[__name__] = groups
