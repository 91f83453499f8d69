"""How often an elastic launcher, ours or torchrun, has started the ranks of this job anew.

Pure. Called by `deepspeed.initialize`, for the run log.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["VARIABLE", "restarts"]

VARIABLE = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable that both launchers set for their ranks."""


def restarts(environ: Mapping[str, str]) -> int:
    """What the launcher says; 0 where none says anything."""
    text = environ.get(VARIABLE, "")
    return int(text) if text.isdecimal() else 0
