"""Small decoders of the structure that transformers builds: of Llama's kind and of GPT-2's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH = 19, 8


class Rotary(nn.Module):
    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = positions[..., None] / torch.arange(1, WIDTH + 1)
        return angle.cos().to(hidden.dtype), angle.sin().to(hidden.dtype)


class Block(nn.Module):
    """Attention of one head over rotated hidden states, then a linear layer; takes what Llama's blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        assert kwargs["use_cache"] is False
        x = hidden_states
        if position_embeddings is not None:
            cos, sin = position_embeddings
            x = x * cos + x.flip(-1) * sin
        q = x.unsqueeze(1)
        mixed = F.scaled_dot_product_attention(q, q, q, attn_mask=attention_mask, is_causal=attention_mask is None)
        return hidden_states + torch.tanh(self.inner(mixed.squeeze(1)))


class OldBlock(Block):
    """Takes no other arguments, and returns a tuple, as older versions do."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        return (super().forward(hidden_states, attention_mask, use_cache=False),)


def causal(length: int, window: int | None) -> torch.Tensor:
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < (window or length))
    return torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)


class Llama(nn.Module):
    """`embed_tokens`, `layers`, `norm` and `rotary_emb` in `model`, and `lm_head`."""

    def __init__(self, attention: str = "sdpa", window: int | None = None, kinds: list[str] | None = None) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation=attention, sliding_window=window, layer_types=kinds)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.model.layers = nn.ModuleList(Block() for _ in range(3))
        self.model.norm = nn.LayerNorm(WIDTH)
        self.model.rotary_emb = Rotary()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        hidden, length = self.model.embed_tokens(tokens), tokens.shape[1]
        rotary = self.model.rotary_emb(hidden, torch.arange(length)[None])
        for at, block in enumerate(self.model.layers):
            is_full = self.config.layer_types is not None and self.config.layer_types[at] == "full_attention"
            mask: torch.Tensor | None = causal(length, None if is_full else self.config.sliding_window)
            if attention_mask is not None:
                assert mask is not None
                mask = mask.masked_fill(~attention_mask[:, None, None].bool(), torch.finfo(torch.float32).min)
            elif self.config._attn_implementation == "sdpa" and self.config.sliding_window is None:
                mask = None
            hidden = block(hidden, attention_mask=mask, position_embeddings=rotary, use_cache=False)
        return SimpleNamespace(logits=self.lm_head(self.model.norm(hidden)))


class Gpt2(nn.Module):
    """`wte`, `wpe`, `drop`, `h` and `ln_f` in `transformer`, and `lm_head` with the weight of `wte` and a bias."""

    def __init__(self, scale: float = 1.0, dropout: float = 0.5) -> None:
        super().__init__()
        self.scale = scale
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer.wpe = nn.Embedding(32, WIDTH)
        self.transformer.drop = nn.Dropout(dropout)
        self.transformer.h = nn.ModuleList(OldBlock() for _ in range(2))
        self.transformer.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        hidden = self.transformer.drop(self.transformer.wte(tokens) + self.transformer.wpe(torch.arange(length)[None]))
        for block in self.transformer.h:
            (hidden,) = block(hidden, causal(length, None))
        return self.lm_head(self.transformer.ln_f(hidden)) * self.scale
