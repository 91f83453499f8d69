"""The engine: what `deepspeed.initialize` returns, and the one place that chooses its parts.

`build` chooses, `parts` holds, `engine` runs a step, `saving` and `loading` take state out and in, `report` tells.
Import the module that you need; this door loads none of them.
"""

from __future__ import annotations

__all__ = ["accumulation", "build", "engine", "loading", "parts", "report", "saving", "whole_model"]
