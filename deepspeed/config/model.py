"""Blocks about the model itself: `hybrid_engine`, `sparse_attention`, `progressive_layer_drop`, `eigenvalue`.

Lives here: keys and ranges. Does not live here: what they do to a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from deepspeed.config.base import ConfigModel
from deepspeed.config.faults import Refusal
from deepspeed.config.values import (
    NonNegativeNumber,
    NonNegativeWhole,
    Number,
    PositiveNumber,
    PositiveWhole,
)

__all__ = ["EigenvalueConfig", "HybridEngineConfig", "ProgressiveLayerDropConfig", "SparseAttentionConfig"]


class HybridEngineConfig(ConfigModel):
    """`hybrid_engine`: train and generate with one engine."""

    enabled: bool = False
    """Use it."""

    max_out_tokens: PositiveWhole = 512
    """Most tokens, prompt included; > 0."""

    inference_tp_size: PositiveWhole = 1
    """Tensor-parallel ranks while generating; > 0."""

    release_inference_cache: bool = False
    """Free the key-value cache after generating."""

    pin_parameters: bool = True
    """Keep gathered parameters between generations."""

    tp_gather_partition_size: PositiveWhole = 8
    """Layers gathered at a time; > 0."""

    enable_cuda_graph: bool = False
    """Generate through a recorded graph."""


_BIGBIRD = {"num_random_blocks", "num_sliding_window_blocks", "num_global_blocks"}
_GLOBAL = {"global_block_indices", "global_block_end_indices"}
_KEYS_OF_MODE = {
    "dense": set[str](),
    "fixed": {
        "num_local_blocks",
        "num_global_blocks",
        "attention",
        "horizontal_global_attention",
        "num_different_global_patterns",
    },
    "variable": {"num_random_blocks", "local_window_blocks", "attention", "horizontal_global_attention", *_GLOBAL},
    "bigbird": _BIGBIRD,
    "bslongformer": {"num_sliding_window_blocks", *_GLOBAL},
}


class SparseAttentionConfig(ConfigModel):
    """`sparse_attention`: layout of block-sparse attention; the model asks the engine for it."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] = "fixed"
    """Family of layouts; each reads its own keys."""

    block: PositiveWhole = 16
    """Tokens along the side of a block; > 0."""

    different_layout_per_head: bool = False
    """Each head has its own layout. Not with `dense`."""

    num_local_blocks: PositiveWhole = 4
    """Blocks in a local window (`fixed`)."""

    num_global_blocks: NonNegativeWhole = 1
    """Blocks that everything attends to (`fixed`, `bigbird`)."""

    attention: Literal["bidirectional", "unidirectional"] = "bidirectional"
    """Whether tokens see later ones (`fixed`, `variable`)."""

    horizontal_global_attention: bool = False
    """Global blocks attend to everything as well (`fixed`, `variable`)."""

    num_different_global_patterns: PositiveWhole = 1
    """Layouts of global blocks over heads (`fixed`)."""

    num_random_blocks: NonNegativeWhole = 0
    """Random blocks per row (`variable`, `bigbird`)."""

    local_window_blocks: list[PositiveWhole] = Field(default_factory=lambda: [4])
    """Blocks in each local window (`variable`)."""

    global_block_indices: list[NonNegativeWhole] = Field(default_factory=lambda: [0])
    """First, or only, block of each global part (`variable`, `bslongformer`)."""

    global_block_end_indices: list[NonNegativeWhole] | None = None
    """Block after the last of each global part (`variable`, `bslongformer`)."""

    num_sliding_window_blocks: PositiveWhole = 3
    """Blocks in the sliding window (`bigbird`, `bslongformer`)."""

    def check(self) -> Iterable[Refusal]:
        """Keys of another mode would not be read."""
        read = _KEYS_OF_MODE[self.mode] | {"mode", "block"}
        if self.mode != "dense":
            read |= {"different_layout_per_head"}
        for key in sorted(self.model_fields_set - read):
            yield Refusal(key, f'needed another mode: "{self.mode}" does not read it', "Leave it out.")


class ProgressiveLayerDropConfig(ConfigModel):
    """`progressive_layer_drop`: skip layers at random, more of them over time (arXiv:2010.13369)."""

    enabled: bool = False
    """Hand forward the arguments `progressive_layer_drop` and `pld_theta`."""

    theta: Annotated[Number, Field(ge=0, le=1)] = 1.0
    """Share of layers kept in the end, 0..1."""

    gamma: NonNegativeNumber = 0.001
    """How fast the share falls per step."""


class EigenvalueConfig(ConfigModel):
    """`eigenvalue`: largest eigenvalue of the Hessian of each block, by power iteration."""

    enabled: bool = False
    """Compute them."""

    verbose: bool = False
    """Log them."""

    max_iter: PositiveWhole = 100
    """Most iterations; > 0."""

    tol: PositiveNumber = 1e-2
    """Relative change at which the iteration stops; > 0."""

    stability: NonNegativeNumber = 1e-6
    """Added to norms before dividing."""

    gas_boundary_resolution: PositiveWhole = 1
    """Optimizer steps between computations; > 0."""

    layer_name: str = "bert.encoder.layer"
    """Name of the list of blocks."""

    layer_num: NonNegativeWhole = 0
    """Blocks in it."""
