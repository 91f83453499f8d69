"""Decoders of several families over two ranks: logits and gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.sequence.data import own_part, pad_batch
from deepspeed.sequence.hugging_face import UlyssesSPAttentionHF
from deepspeed.sequence.loss import mean_over_sequence
from deepspeed.sequence.registry import restore_transformers
from tests.support.ranks import run_ranks
from tests.support.ulysses import VOCABULARY, batch, llama, shifted, token_loss

pytest.importorskip("transformers")

TOLERANCE = 1e-10  # double precision; sums over ranks and heads come in another order
WIDER = {"gemma2": 1e-6, "gpt_oss": 1e-6}
"""These multiply norms by their weights in fp32, so that gradients of those are sums over tokens in fp32."""

NOT_PACKED = {"gpt_oss"}
"""In one process its mask is not told of positions, so that packed samples see each other; over ranks they do not."""

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "use_cache": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 3},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, "attn_implementation": "eager"},
    "phi3": {},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
    "gpt_neox": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gpt_oss": {
        "head_dim": 8,
        "sliding_window": 4,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "experts_implementation": "eager",
        "attn_implementation": "eager",
    },
}


def _decoder(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**_COMMON, **FAMILIES[family]}
    chosen = {"attn_implementation": settings.pop("attn_implementation", "sdpa")}
    if "experts_implementation" in settings:
        chosen["experts_implementation"] = settings.pop("experts_implementation")
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config, **chosen).double()
    for module in model.modules():
        if isinstance(getattr(module, "sinks", None), Tensor):
            torch.nn.init.normal_(module.sinks)
    return model


def _compare(rank: int, world_size: int, model: Any, whole: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """In one process first, then over ranks, with the same model."""
    inputs = {name: tensor for name, tensor in whole.items() if name != "labels"}
    expected = model(**inputs).logits
    token_loss(expected, shifted(whole)).backward()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad()
    UlyssesSPAttentionHF.register_with_transformers(model, None, world_size, 1)
    part = own_part({**whole, "logits": expected.detach()}, rank, world_size)
    own, labels = part.pop("logits"), part.pop("shift_labels")
    logits = model(**part).logits
    torch.testing.assert_close(logits, own, rtol=0, atol=TOLERANCE)
    mean_over_sequence(token_loss(logits, labels), (labels != -100).sum()).backward()
    for name, param in model.named_parameters():
        if gradients[name] is not None:
            comm.all_reduce(param.grad)
            torch.testing.assert_close(param.grad / world_size, gradients[name], rtol=0, atol=tolerance, msg=name)
    restore_transformers()


def _families(rank: int, world_size: int) -> None:
    for family in FAMILIES:
        for packed in ((),) if family in NOT_PACKED else ((), (7, 6)):
            try:
                _compare(rank, world_size, _decoder(family), batch(13, packed=packed), WIDER.get(family, TOLERANCE))
            except AssertionError as error:
                raise AssertionError(f"{family}, packed {packed}: {error}") from error


def test_families_of_decoders_compute_what_one_process_does() -> None:
    run_ranks(_families, 2, timeout_seconds=100)


def _packed_like_flash(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """As flash attention: told what is padding in 2-D, of packed samples by position ids alone, of groups by heads."""
    assert attention_mask is None or attention_mask.dim() == 2
    positions = kwargs["position_ids"]
    tokens = query.shape[2]
    assert positions.shape[1] == tokens
    sample = (positions == 0).cumsum(1)
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril() & (sample[:, :, None] == sample[:, None])
    if attention_mask is not None:
        seen = seen & attention_mask[:, None].bool()
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * kwargs["scaling"]
    weights = scores.masked_fill(~seen[:, None], torch.finfo(scores.dtype).min).softmax(-1)
    return (weights @ value).transpose(1, 2), None


def _like_flash(rank: int, world_size: int) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("by_positions", _packed_like_flash)
    ALL_MASK_ATTENTION_FUNCTIONS.register("by_positions", ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    for kv_heads in (1, 2):
        _compare(rank, world_size, llama(kv_heads=kv_heads, attention="by_positions"), batch(13, packed=(7, 6)))
    padded = pad_batch({**batch(11), "attention_mask": torch.ones(2, 11, dtype=torch.long)}, 6)
    _compare(rank, world_size, llama(attention="by_positions"), padded)


def test_an_implementation_like_flash_is_told_positions_and_padding_of_the_whole() -> None:
    run_ranks(_like_flash, 2)
