"""Door to the cross entropy in blocks of rows."""

from __future__ import annotations

from deepspeed.sequence.chunked_loss import ChunkedCausalLMLoss, chunked_cross_entropy, install_chunked_causal_lm_loss

__all__ = ["ChunkedCausalLMLoss", "chunked_cross_entropy", "install_chunked_causal_lm_loss"]
