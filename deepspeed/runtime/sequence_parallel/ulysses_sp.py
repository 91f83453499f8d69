"""Door to Ulysses for transformers' models."""

from __future__ import annotations

from deepspeed.sequence.data import UlyssesSPDataLoaderAdapter
from deepspeed.sequence.hugging_face import UlyssesSPAttentionHF

__all__ = ["UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter"]
