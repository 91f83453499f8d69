"""Decoders of Hugging Face's library as lists of layers, recognised by their structure; that library is not imported.

    tokens, or (tokens, attention_mask)
      |  TokenEmbedding      model.embed_tokens; transformer.wte + wpe, drop; gpt_neox.embed_in
      |  DecoderBlock  x n   layers, h: positions and the causal mask are made anew in each, so only hidden states travel
      |  FinalNorm           norm, ln_f, final_layer_norm
      v  head                lm_head, embed_out; one module with the embedding where they share the weight
    logits

Lives here: taking such a model apart, and its loss. Does not live here: other shapes of models, which are described by hand.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from deepspeed.errors import PipelineError
from deepspeed.pipe.specs import Layer, TiedLayerSpec

__all__ = ["DecoderBlock", "FinalNorm", "TokenEmbedding", "causal_lm_loss", "to_layers"]

State = Any
"""Hidden states `(batch, length, width)`, or a tuple of them and the attention mask `(batch, length)`, 1 at tokens."""

_PROBE_SHAPE = (2, 8)
_PROBE_EPS = 4  # most that logits may differ, in units of rounding of the largest: the operations are the same


def causal_lm_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of each next token, in float32 at least; labels of -100 do not count.

    Args:
        logits: `(batch, length, vocabulary)`.
        labels: `(batch, length)`: the tokens themselves; they are shifted here.
    """
    precise = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(precise.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def to_layers(model: nn.Module, *, verify: bool = True) -> list[Layer]:
    """Take a decoder for causal language models apart, for `PipelineModule`; the layers hold the model's own parameters.

    It needs the structure of Llama, Mistral, Qwen, GPT-2 or GPT-NeoX as transformers builds them: an embedding, optionally
    learned positions or one rotary embedding, blocks called with hidden states, mask and positions, a norm and a linear
    head. A model that does more than that (scales logits, has positions of several kinds) computes something else, so both
    are compared.

    Args:
        model: for example of `AutoModelForCausalLM.from_config`.
        verify: run a few tokens through the model and the layers, and compare; False where the weights are not there yet.

    Returns:
        The layers; the first takes tokens `(batch, length)`, or a tuple of tokens and attention mask, the last gives logits.

    Raises:
        PipelineError: a part is missing, or the layers compute something else; the text says which.
    """
    base = _part(model, "model", "transformer", "gpt_neox")
    head = _part(model, "lm_head", "embed_out")
    tokens = _part(base, "embed_tokens", "wte", "embed_in")
    config = getattr(model, "config", None)
    rotary = getattr(base, "rotary_emb", None)
    inner = (tokens, getattr(base, "wpe", None), _found(base, "drop", "emb_dropout"), getattr(head, "bias", None))
    blocks: Sequence[nn.Module] = list(_part(base, "layers", "h").children())
    layers: list[Layer] = [
        *(DecoderBlock(block, rotary, _attention(config), _window(config, at)) for at, block in enumerate(blocks)),
        FinalNorm(_part(base, "norm", "ln_f", "final_layer_norm")),
    ]
    if head.weight is tokens.weight:
        layers.insert(0, TiedLayerSpec("embed", TokenEmbedding, *inner, tied_weight_attr="tokens.weight"))
        layers.append(TiedLayerSpec("embed", TokenEmbedding, *inner, forward_fn=_project, tied_weight_attr="tokens.weight"))
    else:
        layers.insert(0, TokenEmbedding(*inner[:3]))
        layers.append(head)
    if verify:
        _compare(model, layers, tokens)
    return layers


class TokenEmbedding(nn.Module):
    """Tokens to hidden states; with the weights of the head where these are the embedding's.

    Args:
        tokens: embedding of tokens.
        positions: embedding of positions that is added, or None.
        dropout: applied to the sum, or None.
        head_bias: added to logits where this is the head too.
    """

    def __init__(
        self,
        tokens: nn.Module,
        positions: nn.Module | None,
        dropout: nn.Module | None,
        head_bias: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = positions
        self.dropout = dropout
        self.register_parameter("head_bias", head_bias)

    def forward(self, inputs: Any) -> State:
        """Embed tokens; an attention mask goes along."""
        tokens, mask = inputs if isinstance(inputs, (tuple, list)) else (inputs, None)
        hidden = self.tokens(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions(_positions(hidden))
        if self.dropout is not None:
            hidden = self.dropout(hidden)
        return _state(hidden, mask)


class DecoderBlock(nn.Module):
    """One block, with what the whole model would hand it.

    Args:
        block: called with hidden states and, as far as it takes them, mask and positions by name.
        rotary: makes position embeddings of hidden states and positions, or None.
        attention: implementation of attention, as transformers names it: what it takes for a mask depends on it.
        window: most recent positions that a token sees, itself included; None means all.
    """

    def __init__(self, block: nn.Module, rotary: nn.Module | None, attention: str, window: int | None) -> None:
        super().__init__()
        self.block = block
        self.rotary = rotary
        self._attention = attention
        self._window = window
        accepted = inspect.signature(block.forward).parameters
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
        offered = ("attention_mask", "position_ids", "position_embeddings", "use_cache")
        self._names = [name for name in offered if takes_any or name in accepted]

    def forward(self, state: State) -> State:
        """Compute the block; an attention mask goes along."""
        hidden, mask = state if isinstance(state, (tuple, list)) else (state, None)
        positions = _positions(hidden)
        offered: dict[str, Any] = {
            "attention_mask": _mask(self._attention, hidden, mask, self._window),
            "position_ids": positions,
            "use_cache": False,
        }
        if self.rotary is not None:
            offered["position_embeddings"] = self.rotary(hidden, positions)
        outputs = self.block(hidden, **{name: offered[name] for name in self._names if name in offered})
        return _state(outputs[0] if isinstance(outputs, tuple) else outputs, mask)


class FinalNorm(nn.Module):
    """The norm after the last block, where the attention mask ends."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, state: State) -> torch.Tensor:
        """Norm hidden states."""
        normed: torch.Tensor = self.norm(state[0] if isinstance(state, (tuple, list)) else state)
        return normed


def _project(embedding: Any, hidden: torch.Tensor) -> torch.Tensor:
    return F.linear(hidden, embedding.tokens.weight, embedding.head_bias)


def _state(hidden: torch.Tensor, mask: torch.Tensor | None) -> State:
    return hidden if mask is None else (hidden, mask)


def _positions(hidden: torch.Tensor) -> torch.Tensor:
    return torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)


def _mask(attention: str, hidden: torch.Tensor, mask: torch.Tensor | None, window: int | None) -> torch.Tensor | None:
    """Return what this implementation of attention needs to be causal: nothing, or `(batch or 1, 1, length, length)` to add.

    The flash kinds are causal by themselves, window included, and take the mask of tokens as it is; torch's own is causal
    where it gets none; all others are told everything.
    """
    length = hidden.shape[1]
    if attention.startswith("flash"):
        return mask
    if attention == "sdpa" and mask is None and (window is None or length <= window):
        return None
    distance = torch.arange(length, device=hidden.device)
    distance = distance.unsqueeze(1) - distance
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    seen = seen[None, None] if mask is None else seen[None, None] & mask[:, None, None, :].bool()
    return torch.zeros(seen.shape, dtype=hidden.dtype, device=hidden.device).masked_fill(
        ~seen, torch.finfo(hidden.dtype).min
    )


def _attention(config: Any) -> str:
    return getattr(config, "_attn_implementation", None) or "eager"


def _window(config: Any, block: int) -> int | None:
    """Return the window of a block: that of the model, unless the model says that this block sees everything."""
    kinds = getattr(config, "layer_types", None)
    kind = "sliding_attention" if kinds is None else kinds[block]
    if kind not in ("full_attention", "sliding_attention"):
        raise PipelineError(
            f"block {block} has attention of the kind {kind!r}; to_layers knows full and sliding attention. "
            "Describe the layers by hand."
        )
    window: int | None = getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
    return window


def _found(module: nn.Module, *names: str) -> nn.Module | None:
    return next((child for name in names if (child := getattr(module, name, None)) is not None), None)


def _part(module: nn.Module, *names: str) -> Any:
    found = _found(module, *names)
    if found is None:
        raise PipelineError(
            f"{type(module).__name__} has none of {', '.join(names)}, so it is no decoder that to_layers knows. "
            f"It has: {', '.join(name for name, _ in module.named_children())}. Describe the layers by hand."
        )
    return found


@torch.no_grad()
def _compare(model: nn.Module, layers: Sequence[Layer], tokens: nn.Module) -> None:
    weight: torch.Tensor = tokens.weight  # type: ignore[assignment]
    probe = torch.arange(_PROBE_SHAPE[0] * _PROBE_SHAPE[1], device=weight.device).view(_PROBE_SHAPE) % weight.shape[0]
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        expected = model(probe)
        expected = getattr(expected, "logits", expected)
        found = _run(model, layers, probe)
    finally:
        for module, training in modes:
            module.training = training
    off = float((found - expected).abs().max() / expected.abs().max())
    if not off <= _PROBE_EPS * torch.finfo(expected.dtype).eps:
        raise PipelineError(
            f"the layers of {type(model).__name__} give logits that differ from the model's by {off:.2g} of the largest: "
            "it does something between its layers that to_layers does not know. Describe the layers by hand."
        )


def _run(model: nn.Module, layers: Sequence[Layer], probe: torch.Tensor) -> Any:
    found: Any = probe
    for index, layer in enumerate(layers):
        call = layer.bind(layer.build()) if isinstance(layer, TiedLayerSpec) else layer
        assert callable(call)  # to_layers makes tied descriptions and modules
        try:
            found = call(found)
        except Exception as error:  # of the model's own code, whatever it is
            raise PipelineError(
                f"layer {index} of {type(model).__name__} cannot run by itself: {type(error).__name__}: {error}. "
                "Describe the layers by hand."
            ) from error
    return found
