"""A Hugging Face decoder whose MLPs and loss run in tiles, by one call.

    tile_decoder(model)         each decoder layer's `mlp`: TiledMLP
                                model(input_ids, labels=...): hidden states --> TiledFusedLogitsLoss --> loss, no logits

Without labels the model's forward is what it was: evaluation and generation see logits.

Lives here: finding the parts and putting tiles around them. Does not live here: tiles (`tiled`). Nothing here needs
Hugging Face's library: what counts is how the model is built.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.errors import ArgumentError, UsageError
from deepspeed.sequence.tiled import TiledFusedLogitsLoss, TiledMLP

__all__ = ["tile_decoder"]

_LOGITS_TILE_NUMEL = 1 << 28
"""Logits of a tile where nobody chose: 1 GiB in fp32 (ALST, arXiv:2506.13996, section 3.1.1)."""

_CHECKED_TOKENS = 4
_OF_THE_LOSS = ("kwargs", "labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "return_dict")
"""Arguments of a causal language model's forward that are not for its base."""

_MLP_NAMES = ("mlp", "feed_forward", "ffn")


def tile_decoder(
    model: nn.Module, *, mlp_tiles: int | None = None, loss_tiles: int | None = None, is_checked: bool = True
) -> nn.Module:
    """Let a causal language model compute its MLPs and its loss in tiles; returns the model. Call it before `initialize`.

    Args:
        model: built like Hugging Face's decoders: `base_model` gives hidden states, `get_output_embeddings()` is the head,
            and repeated layers each have a position-wise `mlp`.
        mlp_tiles: tiles of an MLP; None: as many as make a tile as long as the model is wide; 0: leave the MLPs alone.
        loss_tiles: tiles of the loss; None: so many that a tile's logits take 1 GiB in fp32; 0: leave the loss alone.
        is_checked: compare logits of a few tokens first, where the weights are there: head and hidden states could
            otherwise be different from what the model makes of them (a scaled head, capped logits).

    Raises:
        ArgumentError: parts that were not found, or logits that are not those of the head.
    """
    owner: Any = model
    if loss_tiles is None or loss_tiles > 0:
        parts = _Parts(model)
        if is_checked:
            parts.check()
        plain = _untiled(owner.forward, _forward_with_loss)
        owner.forward = partial(_forward_with_loss, owner, plain, loss_tiles)
        owner.forward.__signature__ = inspect.signature(plain)  # Trainer reads there which columns of the data it may pass
    if mlp_tiles is None or mlp_tiles > 0:
        found: list[Any] = list(_mlps(model))
        if not found:
            raise ArgumentError(
                f"tile_decoder: {type(model).__name__} has no list of layers with one of {_MLP_NAMES}. Use TiledMLP.apply "
                "in the forward of its MLP, and mlp_tiles=0 here."
            )
        for mlp in found:
            mlp.forward = partial(_tiled_mlp, _untiled(mlp.forward, _tiled_mlp), mlp_tiles)
    return model


def _untiled(forward: Any, tiled: Any) -> Any:
    """What an earlier call has put tiles around, or `forward` itself."""
    if isinstance(forward, partial) and forward.func is tiled:
        return next(each for each in forward.args if inspect.isroutine(each) or isinstance(each, partial))
    return forward


# -- MLPs -------------------------------------------------------------------------------------------------------------


def _mlps(model: nn.Module) -> Iterator[nn.Module]:
    """The MLPs of layers in lists. A mixture of experts routes all its tokens at once: it is left as it is."""
    for layers in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        for layer in layers:
            named = dict(layer.named_children())
            mlp = next((named[name] for name in _MLP_NAMES if name in named), None)
            if mlp is not None and not any("expert" in name.lower() for name, _ in mlp.named_modules()):
                yield mlp


def _tiled_mlp(forward: Callable[[Tensor], Tensor], tiles: int | None, x: Tensor) -> Tensor:
    return TiledMLP.apply(_call, forward, x, tiles or math.ceil(max(1, x.size(-2)) / x.size(-1)))


def _call(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return forward(x)


# -- the loss ---------------------------------------------------------------------------------------------------------


class _Parts:
    """The two parts of a causal language model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        embeddings = getattr(model, "get_output_embeddings", None)
        self.head: nn.Module | None = embeddings() if callable(embeddings) else None
        self.base: nn.Module | None = getattr(model, "base_model", None)
        if self.head is None or self.base is None or self.base is model:
            raise ArgumentError(
                f"tile_decoder: {type(model).__name__} has no base_model and get_output_embeddings(), as Hugging Face's "
                "causal language models have. Call TiledFusedLogitsLoss in its forward, and give loss_tiles=0 here."
            )

    def hidden(self, *args: Any, **kwargs: Any) -> Any:
        assert self.base is not None  # the constructor
        return self.base(*args, **kwargs)

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.head is not None  # the constructor
        logits: Tensor = self.head(hidden)
        return logits

    @torch.no_grad()
    def check(self) -> None:
        """Compare the head of the hidden states with what the model gives for a few tokens.

        Raises:
            ArgumentError: they differ.
        """
        params = list(self._model.parameters())
        if any(param.is_meta or hasattr(param, "ds_id") for param in params):
            return  # no weights here to compare with
        was_training = [module for module in self._model.modules() if module.training]
        self._model.eval()
        tokens = torch.arange(1, _CHECKED_TOKENS + 1, device=params[0].device)[None]
        expected = self._model(input_ids=tokens, use_cache=False).logits
        found = self.logits(self.hidden(input_ids=tokens, use_cache=False)[0])
        for module in was_training:
            module.training = True
        if not torch.allclose(found.float(), expected.float(), rtol=1e-2, atol=1e-3):
            raise ArgumentError(
                f"tile_decoder: the logits of {type(self._model).__name__} are not its output embeddings applied to its "
                "hidden states: it scales or caps them. Call TiledFusedLogitsLoss with a function that does so too, and "
                "give loss_tiles=0 here."
            )


def _forward_with_loss(model: Any, forward: Any, tiles: int | None, *args: Any, **kwargs: Any) -> Any:
    """The model's forward; with labels, one that makes no logits."""
    bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    named = {**bound, **bound.get("kwargs", {})}
    labels: Any = named.get("labels")
    shift_labels, items = named.get("shift_labels"), named.get("num_items_in_batch")
    if labels is None and shift_labels is None:
        return forward(*args, **kwargs)
    if named.get("output_router_logits") or getattr(model.config, "output_router_logits", False):
        raise UsageError(
            "tile_decoder: output_router_logits asks for a loss of the router, which the tiled loss does not have. Turn it "
            "off, or give loss_tiles=0."
        )
    parts = _Parts(model)
    outputs = parts.hidden(**{name: value for name, value in named.items() if name not in _OF_THE_LOSS}, return_dict=True)
    hidden = outputs.last_hidden_state
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
    loss = _loss(parts, hidden, shift_labels.to(hidden.device), items, tiles)
    classes = importlib.import_module("transformers.modeling_outputs")  # loaded: the model came from there
    return classes.CausalLMOutputWithPast(
        loss=loss, hidden_states=outputs.get("hidden_states"), attentions=outputs.get("attentions")
    )


def _loss(parts: _Parts, hidden: Tensor, labels: Tensor, items: Any, tiles: int | None) -> Tensor:
    reduction: Literal["mean", "sum"] = "mean" if items is None else "sum"

    def of_tile(_: None, x: Tensor, y: Tensor) -> Tensor:
        logits = parts.logits(x).flatten(0, 1)
        wide = logits if logits.dtype is torch.float64 else logits.float()
        return F.cross_entropy(wide, y.flatten(), reduction=reduction)

    if tiles is None:
        head: Any = parts.head
        vocabulary = getattr(head, "out_features", 1)
        tiles = math.ceil(max(1, hidden.shape[:2].numel() * vocabulary) / _LOGITS_TILE_NUMEL)
    loss = TiledFusedLogitsLoss.apply(of_tile, None, hidden, labels, None, tiles, None, reduction)
    if items is None:
        return loss
    return loss / (items.to(loss.device) if isinstance(items, Tensor) else items)
