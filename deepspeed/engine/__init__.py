"""The engine: what `deepspeed.initialize` returns, and the one place that chooses its parts.

`build` chooses, `parts` holds, `engine` runs a step, `save_load` takes state out and in, `report` tells. Import the module
that you need; this door loads none of them.
"""

from __future__ import annotations

__all__ = ["accumulation", "build", "engine", "parts", "report", "save_load"]
