"""Door to `deepspeed.topology.grid` and `deepspeed.pipe.grid`."""

from __future__ import annotations

from deepspeed.pipe.grid import PipelineParallelGrid
from deepspeed.topology.grid import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid", "ProcessTopology"]
