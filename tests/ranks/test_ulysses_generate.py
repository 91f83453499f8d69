"""`generate` of a model over sequence ranks: every rank's prompts are its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.sequence.data import own_part
from deepspeed.sequence.registry import restore_transformers
from tests.support.ranks import run_ranks
from tests.support.ulysses import batch, llama

pytest.importorskip("transformers")

LENGTH = 10


def _prompts(rank: int, is_alike: bool) -> dict[str, Tensor]:
    """Two prompts, the first one padded at its left; of other lengths on other ranks."""
    length = LENGTH if is_alike else LENGTH + rank
    ids = batch(length, 2, 0 if is_alike else rank)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _generate(rank: int, world_size: int, attention: str) -> None:
    from transformers import GenerationMixin

    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    cases = [(is_alike, use_cache) for is_alike in (True, False) for use_cache in (False, True)]
    plain = llama(attention=attention).eval()
    expected = [plain.generate(**_prompts(rank, is_alike), use_cache=use, **settings) for is_alike, use in cases]
    whole = batch(LENGTH)
    inputs = {name: whole[name] for name in ("input_ids", "position_ids")}
    logits = plain(**inputs).logits
    before = GenerationMixin.generate

    model = llama(attention=attention).eval()
    UlyssesSPAttentionHF.register_with_transformers(model, None, 2, 2)
    for (is_alike, use), tokens in zip(cases, expected, strict=True):
        found = model.generate(**_prompts(rank, is_alike), use_cache=use, **settings)
        assert torch.equal(found, tokens), (is_alike, use)
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.generate(**_prompts(rank, True), max_new_tokens=0)
    part = own_part({**whole, "logits": logits}, rank, 2)  # and over parts again, also after a failure
    found = model(input_ids=part["input_ids"], position_ids=part["position_ids"]).logits
    torch.testing.assert_close(found, part["logits"], rtol=0, atol=1e-10)
    restore_transformers()
    assert GenerationMixin.generate is before


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_each_rank_generates_after_its_own_prompts(attention: str) -> None:
    run_ranks(_generate, 2, attention)
