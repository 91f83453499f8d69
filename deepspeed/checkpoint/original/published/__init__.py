"""Classes and functions around the original's files that its clients import from `deepspeed.checkpoint`.

Does not live here: loading a checkpoint into an engine (`original.reading`).
"""

from __future__ import annotations
