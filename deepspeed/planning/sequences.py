"""What Ulysses takes and sends on a rank of a Hugging Face model whose sequences lie on several ranks.

    each attention      query, key and value to heads, the context back        in forward; the same in backward

The attention itself is traced over this rank's tokens with all heads, which takes what all tokens with this rank's heads do:
the exchange asks for values that a trace has not (lengths, positions). Source: Ulysses (arXiv:2309.14509), section 3.

Called by `of_module`. Does not live here: the exchange (`sequence`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from deepspeed.comm.parts import part_nbytes, row_nbytes
from deepspeed.planning.tracing import Batch
from deepspeed.precision.policy import DtypePolicy
from deepspeed.sequence.exchange import HeadPlan
from deepspeed.sequence.hugging_face import head_counts

__all__ = ["Exchanged", "exchanged"]


class Exchanged(NamedTuple):
    """Of one rank."""

    sent_nbytes: int = 0
    """In forward and backward of one micro-batch."""

    shared_nbytes: int = 0
    """Of memory through which ranks on CPUs of one host exchange."""


def exchanged(module: nn.Module | None, batch: Batch | None, policy: DtypePolicy, ranks: int) -> Exchanged:
    """What a model's attention exchanges over `ranks` sequence-parallel ranks.

    Args:
        module: nothing is known of others than Hugging Face's.
        batch: of one rank; its `input_ids` tell how many tokens.
        policy: formats.
        ranks: that share a sequence.

    Raises:
        ArgumentError: there are fewer heads than ranks.
    """
    config: Any = getattr(module, "config", None)
    tokens = batch[1].get("input_ids") if batch is not None else None
    if ranks == 1 or module is None or not hasattr(config, "get_text_config") or not isinstance(tokens, Tensor):
        return Exchanged()
    text = config.get_text_config()
    queries, size, keys = head_counts(text)
    plan = HeadPlan(queries, keys, ranks)
    itemsize = (policy.autocast or policy.param or next(module.parameters()).dtype).itemsize
    most = max(range(ranks), key=lambda rank: len(plan.queries(rank)) + 2 * len(plan.keys(rank)))
    shapes = [(tokens.numel(), heads, size) for heads in map(len, (plan.queries(most), plan.keys(most), plan.keys(most)))]
    of_token = (2 * queries + 2 * keys) * size * itemsize
    sent = 2 * text.num_hidden_layers * tokens.numel() * of_token * (ranks - 1) // ranks
    return Exchanged(sent, row_nbytes(part_nbytes(shapes, [itemsize] * len(shapes)), ranks))
