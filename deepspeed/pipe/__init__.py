"""Models cut into stages: how a model is described and cut, and in which order its stages compute.

    layers --> partition --> PipelineModule (this rank's layers)      orders --> timeline, drawing
               (pure)        specs, ties, grid                        (pure)     (pure)

Lives here: the public names, loaded when first used; the pure files load no torch. Training one is the engine's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.common.lazy import attach

if TYPE_CHECKING:
    from deepspeed.errors import PipelineError as PipelineError
    from deepspeed.pipe.decoder import causal_lm_loss as causal_lm_loss
    from deepspeed.pipe.decoder import to_layers as to_layers
    from deepspeed.pipe.module import PipelineModule as PipelineModule
    from deepspeed.pipe.specs import LayerSpec as LayerSpec
    from deepspeed.pipe.specs import TiedLayerSpec as TiedLayerSpec

__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec", "causal_lm_loss", "to_layers"]

__getattr__, __dir__ = attach(
    __name__,
    names={
        "LayerSpec": "deepspeed.pipe.specs:LayerSpec",
        "PipelineError": "deepspeed.errors:PipelineError",
        "PipelineModule": "deepspeed.pipe.module:PipelineModule",
        "TiedLayerSpec": "deepspeed.pipe.specs:TiedLayerSpec",
        "causal_lm_loss": "deepspeed.pipe.decoder:causal_lm_loss",
        "to_layers": "deepspeed.pipe.decoder:to_layers",
    },
)
