"""Attention masks of transformers' models when each rank holds a part of the sequence.

    model:     create_causal_mask(..)  -->  mask function of the implementation   replaced: returns a MaskOfParts
    attention: MaskOfParts.whole(..)   -->  positions and padding of all ranks, gathered once per forward
                                       -->  transformers' own mask of the whole sequence, made once per forward

A mask that a rank made of its part would know neither the other ranks' tokens nor where packed samples begin there. So the
model carries what it knows to the attention, which needs the whole mask, in the form of the implementation it has: 4-D for
eager and SDPA (none at all where causal says all), 2-D padding for flash attention.

Lives here: the carrier, what is gathered, making the whole mask. Does not live here: putting it into transformers
(`sequence.registry`). Called by `sequence.hugging_face`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.errors import ArgumentError
from deepspeed.sequence.exchange import Lengths
from deepspeed.sequence.library import transformers
from deepspeed.sequence.parts import gathered_integers

__all__ = ["MaskOfParts", "WholeSequence", "local_mask", "whole_of"]


@dataclass
class WholeSequence:
    """What is known of the sequence on all ranks.

    Attributes:
        lengths: tokens of each rank.
        position_ids: (batch, tokens), or None where the model hands none to its attention.
        padding: (batch, tokens), true for real tokens, or None.
        masks: made of it so far, by kind.
    """

    lengths: Lengths
    position_ids: Tensor | None
    padding: Tensor | None
    masks: dict[tuple[bool, bool], Any] = field(default_factory=dict)

    @classmethod
    def gathered(
        cls,
        group: comm.ProcessGroup | None,
        query: Tensor,
        lengths: Lengths | None,
        positions: Tensor | None,
        padding: Tensor | None,
    ) -> WholeSequence:
        """Bring together what each rank knows of its part. Every rank of the group must call it.

        Args:
            group: ranks that share the sequence.
            query: (batch, heads, tokens, head size): this rank's.
            lengths: None where only the ranks know: asks them.
            positions: (batch or 1, tokens) of this rank; others are of no use here, and left out.
            padding: (batch, tokens) of this rank.
        """
        batch, _, length, _ = query.shape
        if positions is not None and (positions.dim() != 2 or positions.shape[1] != length):
            positions = None
        if lengths is None:
            lengths = Lengths(tuple(each for (each,) in gathered_integers([length], group, query.device)))
        known = [each.expand(batch, length) for each in (positions, padding) if each is not None]
        whole = iter(_gathered(torch.stack(known).long(), lengths, group) if known else ())
        return cls(lengths, None if positions is None else next(whole), None if padding is None else next(whole).bool())

    def mask(self, config: Any, query: Tensor, is_causal: bool, is_sliding: bool) -> Any:
        """Make transformers' mask of the whole sequence, or return the one made before.

        Args:
            config: of the attention module; names the implementation and the window.
            query: the whole sequence's, for batch, dtype and device.
            is_causal: False: every token sees all.
            is_sliding: only the last tokens of a window are seen.
        """
        key = (is_causal, is_sliding)
        if key not in self.masks:
            self.masks[key] = self._made(config, query, is_causal, is_sliding)
        return self.masks[key]

    def _made(self, config: Any, query: Tensor, is_causal: bool, is_sliding: bool) -> Any:
        masking_utils = transformers("masking_utils")
        like = query.new_empty(query.shape[0], self.lengths.total, 0)
        common = {"config": config, "inputs_embeds": like, "attention_mask": self.padding}
        if not is_causal:
            return masking_utils.create_bidirectional_mask(**common)
        make = masking_utils.create_sliding_window_causal_mask if is_sliding else masking_utils.create_causal_mask
        return make(**common, cache=None, position_ids=self.position_ids)


def _gathered(parts_KBL: Tensor, lengths: Lengths, group: comm.ProcessGroup | None) -> Tensor:
    """Every rank's part side by side along the last dimension. `K` = things known, `B` = batch, `L` = tokens."""
    longest = max(lengths.tokens)
    padded_KBL = torch.nn.functional.pad(parts_KBL, (0, longest - parts_KBL.shape[-1])).contiguous()
    everyone = [torch.empty_like(padded_KBL) for _ in lengths.tokens]
    comm.all_gather(everyone, padded_KBL, group)
    return torch.cat([part_KBL[..., :length] for part_KBL, length in zip(everyone, lengths.tokens, strict=True)], -1)


class MaskOfParts:
    """What a model knows of its mask, on its way to the attention.

    Args:
        padding: (batch, tokens) of this rank, true for real tokens, or None.
        local: makes transformers' mask of this rank's tokens alone.
    """

    def __init__(self, padding: Tensor | None, local: Callable[[], Any]) -> None:
        self.padding = padding
        self._make_local = local
        self._local: list[Any] = []
        self._whole: WholeSequence | None = None

    def local(self) -> Any:
        """The mask of this rank's tokens as a sequence of their own, made once."""
        if not self._local:
            self._local.append(self._make_local())
        return self._local[0]

    def whole(self, gather: Callable[[Tensor | None], WholeSequence]) -> WholeSequence:
        """What `gather(padding)` brings; the first attention of a forward gathers, on all ranks."""
        if self._whole is None:
            self._whole = gather(self.padding)
        return self._whole


def whole_of(mask: Any, gather: Callable[[Tensor | None], WholeSequence]) -> WholeSequence:
    """What is known of the whole sequence, given what a model hands to its attention as a mask.

    Raises:
        ArgumentError: a mask of another kind.
    """
    if isinstance(mask, MaskOfParts):
        return mask.whole(gather)
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
        return gather(mask)
    shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    raise ArgumentError(
        f"an attention mask of {shape} over a sequence that lies on several ranks; needed None or (batch, tokens of "
        "this rank). "
        "Say which samples are packed by position_ids, which start at 0 with each sample, and what is padding by a 2-D mask."
    )


def local_mask(mask: Any) -> Any:
    """The mask for this rank's tokens as a sequence of their own."""
    return mask.local() if isinstance(mask, MaskOfParts) else mask
