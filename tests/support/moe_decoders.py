"""Small decoders with experts as transformers 5 builds them, from configs alone, and what they are fed.

`transformers` is imported when a model is made: its import takes seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.models import Batch, TinyModel, build

_COMMON: dict[str, Any] = {
    "vocab_size": TinyModel.VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DEEPSEEK: dict[str, Any] = {
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
}
_QWEN: dict[str, Any] = {"moe_intermediate_size": 8, "num_experts": 8, "decoder_sparse_step": 1}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", {**_QWEN, "shared_expert_intermediate_size": 12, "num_experts_per_tok": 3}),
    "qwen3_moe": ("Qwen3Moe", {**_QWEN, "head_dim": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "deepseek_v2": ("DeepseekV2", {**_DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", {**_DEEPSEEK, "num_experts_per_tok": 4}),
    "gpt_oss": ("GptOss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}),
    "nemotron_h": (
        "NemotronH",
        {
            **{"layers_block_type": ["attention", "moe"], "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 8, "moe_shared_expert_intermediate_size": 8, "n_group": 1, "topk_group": 1},
            **{"moe_latent_size": None},
        },
    ),
}
"""Kind of model -> prefix of its classes, its own settings."""


class MoeDecoder(TinyModel):
    """A model of one of `KINDS`; returns its loss. Its experts run one after the other, the plain way."""

    LENGTH = 6

    def __init__(self, kind: str, **settings: Any) -> None:
        super().__init__()
        prefix, own = KINDS[kind]
        library = importlib.import_module("transformers")
        config = getattr(library, f"{prefix}Config")(**{**_COMMON, **own, **settings})
        config._experts_implementation = "eager"
        self.decoder = getattr(library, f"{prefix}ForCausalLM")(config)
        self.config = self.decoder.config

    def batch(self, rows: int, seed: int) -> Batch:
        """Return tokens, (rows, LENGTH)."""
        generator = torch.Generator().manual_seed(seed)
        return (torch.randint(0, self.VOCABULARY, (rows, self.LENGTH), generator=generator),)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.decoder(tokens, labels=tokens, use_cache=False).loss
        return loss


def moe_decoder(kind: str, dtype: torch.dtype = torch.float64, **settings: Any) -> MoeDecoder:
    """Return one whose values are the same at every call, large enough for experts to differ."""

    def make() -> MoeDecoder:
        return MoeDecoder(kind, **settings)

    model = build(make).to(dtype)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def logits_of(model: MoeDecoder) -> Callable[[Tensor], Tensor]:
    """Tokens -> logits."""
    return lambda tokens: model.decoder(tokens, use_cache=False).logits
