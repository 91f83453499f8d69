"""Which variables of an accelerator's libraries a job takes to its other hosts; the accelerator and the launcher read it."""

from __future__ import annotations

__all__ = ["EXPORTED_PREFIXES"]

EXPORTED_PREFIXES: dict[str, tuple[str, ...]] = {
    "cuda": ("NCCL",),
    "npu": ("ASCEND", "HCCL", "LD_LIBRARY", "PATH"),
    "mlu": ("NEUWARE_HOME", "CNCL", "LD_LIBRARY", "PATH"),
}
"""Prefixes of variable names by accelerator; one that is not here has none."""
