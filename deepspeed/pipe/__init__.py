"""Models cut into stages: how a model is described and cut, and in which order its stages compute.

    layers --> partition --> PipelineModule (this rank's layers)      orders --> timeline, drawing
               (pure)        specs, ties, grid                        (pure)     (pure)

Lives here: the public names, loaded when first used; the pure files load no torch. Training one is the engine's business.
"""

from __future__ import annotations
