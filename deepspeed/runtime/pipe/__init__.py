"""Doors to pipeline parallelism, of which this version has the topology."""

from __future__ import annotations

from deepspeed.common.lazy import attach

__all__ = ["topology"]

__getattr__, __dir__ = attach(
    __name__,
    submodules=("topology",),
    unbuilt={
        name: f"deepspeed.runtime.pipe.{name} is not built yet in this version; see the table in README.md"
        for name in ("LayerSpec", "PipelineModule", "TiedLayerSpec", "engine", "module", "schedule")
    },
)
