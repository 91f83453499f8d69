"""Door to models made of layers: `deepspeed.pipe.module` and `deepspeed.pipe.specs`."""

from __future__ import annotations

from deepspeed.errors import PipelineError
from deepspeed.pipe.module import PipelineModule
from deepspeed.pipe.specs import LayerSpec, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]
