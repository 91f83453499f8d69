"""Doors to pipeline parallelism: `deepspeed.pipe`, and the grids of `deepspeed.topology`."""

from __future__ import annotations

from deepspeed.common.lazy import attach

__all__ = ["LayerSpec", "PipelineModule", "ProcessTopology", "TiedLayerSpec", "engine", "module", "schedule", "topology"]

__getattr__, __dir__ = attach(
    __name__,
    submodules=("engine", "module", "schedule", "topology"),
    names={
        "LayerSpec": "deepspeed.pipe.specs:LayerSpec",
        "PipelineModule": "deepspeed.pipe.module:PipelineModule",
        "ProcessTopology": "deepspeed.topology.grid:ProcessTopology",
        "TiedLayerSpec": "deepspeed.pipe.specs:TiedLayerSpec",
    },
)
