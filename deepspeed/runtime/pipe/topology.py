"""Door to `deepspeed.topology.grid`."""

from __future__ import annotations

from deepspeed.topology.grid import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"]
