"""Small models of Hugging Face's families, built offline, that compute in float64 throughout.

Their norms and softmaxes go through float32 as written, which would hide differences below 1e-7: in the modules of these
families `torch.float32` is made to mean float64 while a test runs, and so is a tensor's `float()` (routers).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 37
"""No multiple of 2 or 4: parts of a vocabulary are uneven."""

_LLAMA: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 22,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}
_NO_DROPOUT: dict[str, Any] = {"attention_dropout": 0.0, "hidden_dropout": 0.0}


@dataclass(frozen=True)
class Family:
    """How to build one small model.

    Attributes:
        module: of transformers that has the classes.
        model: name of the model's class.
        config: name of the config's class, and what it is given.
        needs_every_head: the code of its attention needs a head on each rank.
    """

    module: str
    model: str
    config: tuple[str, dict[str, Any]]
    needs_every_head: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", ("LlamaConfig", {**_LLAMA, "attention_bias": True, "mlp_bias": True})),
    "llama_tied": Family("llama", "LlamaForCausalLM", ("LlamaConfig", {**_LLAMA, "tie_word_embeddings": True})),
    "mistral": Family(
        "mistral", "MistralForCausalLM", ("MistralConfig", {**_LLAMA, "num_key_value_heads": 3, "head_dim": 4})
    ),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", ("Qwen2Config", _LLAMA)),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", ("Qwen3Config", {**_LLAMA, "head_dim": 8})),
    "gpt2": Family(
        "gpt2",
        "GPT2LMHeadModel",
        (
            "GPT2Config",
            {
                **{"n_embd": 24, "n_layer": 2, "n_head": 4, "n_inner": 30, "vocab_size": VOCABULARY, "n_positions": 32},
                **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
            },
        ),
        needs_every_head=True,
    ),
    "gpt_neox": Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        ("GPTNeoXConfig", {**_LLAMA, **_NO_DROPOUT, "use_parallel_residual": True, "rotary_pct": 0.5}),
    ),
    "bert": Family(
        "bert",
        "BertForMaskedLM",
        ("BertConfig", {**_LLAMA, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    ),
    "t5": Family(
        "t5",
        "T5ForConditionalGeneration",
        (
            "T5Config",
            {
                **{"d_model": 24, "d_kv": 4, "d_ff": 30, "num_layers": 2, "num_heads": 6, "vocab_size": VOCABULARY},
                **{"dropout_rate": 0.0, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
            },
        ),
    ),
    "mixtral": Family(
        "mixtral", "MixtralForCausalLM", ("MixtralConfig", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2})
    ),
    "mixtral_odd": Family(
        "mixtral",
        "MixtralForCausalLM",
        ("MixtralConfig", {**_LLAMA, "intermediate_size": 3, "num_local_experts": 5, "num_experts_per_tok": 3}),
    ),
    "qwen2_moe": Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        (
            "Qwen2MoeConfig",
            {
                **{**_LLAMA, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 9, "num_experts": 4},
                **{"num_experts_per_tok": 2, "decoder_sparse_step": 1, "norm_topk_prob": True},
            },
        ),
    ),
    "qwen3_moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        (
            "Qwen3MoeConfig",
            {**_LLAMA, "head_dim": 8, "moe_intermediate_size": 10, "num_experts": 4, "num_experts_per_tok": 2},
        ),
    ),
    "gpt_oss": Family(
        "gpt_oss",
        "GptOssForCausalLM",
        (
            "GptOssConfig",
            {**_LLAMA, "head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
        ),
    ),
    "phi": Family(
        "phi",
        "PhiForCausalLM",
        ("PhiConfig", {**_LLAMA, "qk_layernorm": True, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "num_key_value_heads": 6}),
    ),
    "phi3": Family(
        "phi3",
        "Phi3ForCausalLM",
        ("Phi3Config", {**_LLAMA, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "pad_token_id": 0}),
    ),
    "gemma": Family("gemma", "GemmaForCausalLM", ("GemmaConfig", {**_LLAMA, "num_key_value_heads": 1, "head_dim": 8})),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", ("Gemma2Config", {**_LLAMA, "head_dim": 8})),
    "falcon_mqa": Family(
        "falcon",
        "FalconForCausalLM",
        ("FalconConfig", {**_LLAMA, **_NO_DROPOUT, "multi_query": True}),
        needs_every_head=True,
    ),
    "falcon_new": Family(
        "falcon",
        "FalconForCausalLM",
        ("FalconConfig", {**_LLAMA, **_NO_DROPOUT, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
        needs_every_head=True,
    ),
    "falcon_alibi": Family(
        "falcon",
        "FalconForCausalLM",
        (
            "FalconConfig",
            {**_LLAMA, **_NO_DROPOUT, "num_attention_heads": 4, "alibi": True, "multi_query": False, "bias": True},
        ),
        needs_every_head=True,
    ),
    "opt": Family(
        "opt",
        "OPTForCausalLM",
        ("OPTConfig", {**_LLAMA, "ffn_dim": 30, "word_embed_proj_dim": 24, "dropout": 0.0}),
        needs_every_head=True,
    ),
    "bloom": Family(
        "bloom",
        "BloomForCausalLM",
        ("BloomConfig", {**_NO_DROPOUT, "hidden_size": 24, "n_layer": 2, "n_head": 6, "vocab_size": VOCABULARY}),
        needs_every_head=True,
    ),
}


def build(name: str, **changes: Any) -> Any:
    """A model of a family in float64; equal calls give equal models."""
    family = FAMILIES[name]
    kind, settings = family.config
    config_module = importlib.import_module(f"transformers.models.{family.module}.configuration_{family.module}")
    model_module = importlib.import_module(f"transformers.models.{family.module}.modeling_{family.module}")
    with torch.random.fork_rng():
        torch.manual_seed(7)
        config = getattr(config_module, kind)(**{**settings, **changes})
        config._experts_implementation = "eager"  # the grouped product has no float64
        model: nn.Module = getattr(model_module, family.model)(config)
        with torch.no_grad():
            for key, param in model.named_parameters():
                if param.dim() == 1 or key.endswith("_bias"):  # biases of zero and norms of one would hide mistakes
                    param.add_(0.3 * torch.randn(param.shape))
    return model.double()


def tokens(rows: int = 2, seed: int = 1) -> Tensor:
    """Token numbers (rows, 7)."""
    return torch.randint(1, VOCABULARY, (rows, 7), generator=torch.Generator().manual_seed(seed))


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """Logits (rows, 7, vocabulary)."""
    more = {"decoder_input_ids": ids.flip(1)} if getattr(model.config, "is_encoder_decoder", False) else {}
    logits: Tensor = (
        model(input_ids=ids, use_cache=False, **more).logits if "Bert" not in type(model).__name__ else model(ids).logits
    )
    return logits


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean loss of a shuffled target, in the dtype of the logits."""
    return F.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())


class WithLoss(nn.Module):
    """A model of a family that gives its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        return loss_of(logits_of(self.inner, ids), ids)


class _Double:
    """`torch`, in which float32 means float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextmanager
def double_throughout(name: str) -> Iterator[None]:
    """Let the code of a family compute in float64 where it says float32."""
    family = FAMILIES[name].module
    module: Any = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    with patch.object(module, "torch", _Double()), patch.object(Tensor, "float", Tensor.double):
        yield
