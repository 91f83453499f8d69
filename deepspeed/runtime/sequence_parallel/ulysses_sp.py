"""Door to Ulysses for transformers' models, and to tiles."""

from __future__ import annotations

from deepspeed.sequence.data import UlyssesSPDataLoaderAdapter
from deepspeed.sequence.hugging_face import UlyssesSPAttentionHF
from deepspeed.sequence.tiled import SequenceTiledCompute, TiledFusedLogitsLoss, TiledMLP, sequence_tiled_compute

__all__ = [
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "sequence_tiled_compute",
]
