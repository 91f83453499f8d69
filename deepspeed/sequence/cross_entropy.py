"""Cross-entropy of a sequence that lies in parts on ranks: each token's loss, of all ranks' tokens, on every rank.

Lives here: `vocab_sequence_parallel_cross_entropy`. Does not live here: the mean by tokens that count (`sequence.loss`), and
losses of logits of which each rank has a part of the vocabulary (`tensor_parallel.cross_entropy`), which this module has
under their documented names.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from deepspeed import comm
from deepspeed.sequence.loss import gathered_sequence
from deepspeed.tensor_parallel.cross_entropy import (
    VocabParallelCausalLMLoss,
    VocabParallelCrossEntropyLoss,
    configure_vocab_parallel_loss,
    validate_vocab_parallel_loss,
    vocab_parallel_cross_entropy,
)

__all__ = [
    "VocabParallelCausalLMLoss",
    "VocabParallelCrossEntropyLoss",
    "configure_vocab_parallel_loss",
    "validate_vocab_parallel_loss",
    "vocab_parallel_cross_entropy",
    "vocab_sequence_parallel_cross_entropy",
]


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, sp_group: comm.ProcessGroup | None, ignore_index: int = -100
) -> Tensor:
    """Return the loss of every token of the sequence: (tokens of all ranks, batch), 0 where the target is `ignore_index`.

    Every rank of the group must call it, with parts of the same length, and call backward. Gradients are those of
    `sequence.loss`, [Note: one objective on every rank].

    Args:
        vocab_parallel_logits: (tokens of this rank, batch, vocabulary).
        target: (tokens of this rank, batch).
        sp_group: ranks that share the sequence.
        ignore_index: target of tokens that do not count.
    """
    losses = F.cross_entropy(
        vocab_parallel_logits.flatten(0, 1), target.flatten(), ignore_index=ignore_index, reduction="none"
    )
    return gathered_sequence(losses.view(target.shape), sp_group)
