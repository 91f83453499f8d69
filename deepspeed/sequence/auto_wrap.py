"""Sequence parallelism for a transformers decoder by one call, with groups that exist already.

    auto_wrap_model_for_sp(model, group)      the model's type attends over the ranks of the group from now on

Lives here: what a model says of its attention, and the call. Does not live here: the attention
(`sequence.hugging_face`). Models with a vision tower are not wrapped: their tokens come from two places, which
`detect_model_sp_info` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from deepspeed import comm
from deepspeed.errors import ArgumentError
from deepspeed.sequence.hugging_face import attach_to_model, head_counts

__all__ = ["SPModelInfo", "auto_wrap_model_for_sp", "detect_model_sp_info"]

_PROJECTIONS = ("multi_modal_projector", "vision_projection", "merger")
"""What transformers' models call the module between a vision tower and the decoder."""


@dataclass(frozen=True)
class SPModelInfo:
    """What sequence parallelism needs to know of a model.

    Attributes:
        model_type: transformers' name of the decoder.
        attention: name of the attention implementation it has.
        query_heads: of each layer.
        kv_heads: key and value heads of each layer.
        head_size: of a query head.
        layers: hidden layers.
        llm_attn_modules: (name, module) of each attention of the decoder: these are exchanged.
        vit_attn_modules: likewise of other towers, such as one for images.
        vision_projection_module: (name, module) of what brings a tower's features to the decoder, or None.
    """

    model_type: str
    attention: str
    query_heads: int
    kv_heads: int
    head_size: int
    layers: int
    llm_attn_modules: list[tuple[str, nn.Module]]
    vit_attn_modules: list[tuple[str, nn.Module]]
    vision_projection_module: tuple[str, nn.Module] | None

    @property
    def max_sequence_parallel_size(self) -> int:
        """Ranks that can share a sequence: at most one per query head."""
        return self.query_heads


def detect_model_sp_info(model: nn.Module) -> SPModelInfo:
    """Say what sequence parallelism would do with a transformers model.

    Raises:
        ArgumentError: it is none, or its attention does not go through transformers' registry.
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise ArgumentError(
            f"{type(model).__name__} has no transformers config; needed a transformers model. Put DistributedAttention "
            "around the "
            "attention of a model of your own."
        )
    text = config.get_text_config()
    query_heads, head_size, kv_heads = head_counts(text)
    found: list[tuple[str, Any]] = [(name, module) for name, module in model.named_modules() if _attends(module)]
    own = [(name, module) for name, module in found if module.config.model_type == text.model_type]
    if not own:
        raise ArgumentError(
            f"{type(model).__name__} ({text.model_type}) has no attention that asks transformers' registry; needed "
            "modules with a "
            "config and is_causal. Use a model whose attention can be sdpa, or DistributedAttention."
        )
    others = [(name, module) for name, module in found if module.config.model_type != text.model_type]
    projections = [each for each in model.named_modules() if each[0].rpartition(".")[2] in _PROJECTIONS]
    return SPModelInfo(
        text.model_type,
        text._attn_implementation,
        query_heads,
        kv_heads,
        head_size,
        text.num_hidden_layers,
        own,
        others,
        next(iter(projections), None),
    )


def auto_wrap_model_for_sp(
    model: nn.Module, process_group: comm.ProcessGroup | None, *, disable_in_eval: bool = False
) -> nn.Module:
    """Let a transformers decoder attend over the ranks of a group, and return it.

    Every rank of the group calls it. Lengths may vary. The rest is as `UlyssesSPAttentionHF.register_with_transformers`
    has it: each rank passes its part of `input_ids` and `position_ids`, and averages its loss with
    `sequence.mean_over_sequence`.

    Args:
        model: as `detect_model_sp_info` takes it.
        process_group: ranks that share a sequence; None means all.
        disable_in_eval: in eval mode each rank attends to its own tokens alone.

    Raises:
        ArgumentError: fewer query heads than ranks, a model with other towers, or none of transformers.
    """
    info = detect_model_sp_info(model)
    if info.vit_attn_modules or info.vision_projection_module:
        towers = sorted({name.partition(".layers")[0] for name, _ in info.vit_attn_modules})
        raise ArgumentError(
            f"{type(model).__name__} has attention in {towers} beside {info.model_type}: their tokens "
            "would have to be "
            "cut too. Wrap the decoder alone (model.get_decoder()), and hand it its part of the embeddings."
        )
    attach_to_model(model, info.attention, process_group, disable_in_eval=disable_in_eval)
    return model


def _attends(module: nn.Module) -> bool:
    """Attention modules that call a function of the registry know these of themselves."""
    return all(hasattr(module, name) for name in ("config", "is_causal"))
