"""Sequences that are longer than one device can hold: in parts on ranks (Ulysses), and over time (tiles, chunks).

`layer` and `hugging_face` exchange parts of a sequence for heads around attention, `data` cuts batches, `loss` averages
by the tokens that count. `tiled` runs an MLP or a loss tile by tile (`tiled_decoder`:
of a whole model), `chunked_loss` a cross entropy, `chunked_attention` and `fpdt_layer` attention. Names load
when first used.
"""

from __future__ import annotations

from deepspeed.common.lazy import attach

__all__ = [
    "DistributedAttention",
    "SPModelInfo",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "auto_wrap_model_for_sp",
    "chunked_attention",
    "chunked_loss",
    "cross_entropy",
    "detect_model_sp_info",
    "fpdt_layer",
    "layer",
    "mean_over_sequence",
    "own_part",
    "pad_batch",
    "tiled",
    "tiled_decoder",
]

__getattr__, __dir__ = attach(
    __name__,
    submodules=(
        "chunked_attention",
        "chunked_loss",
        "cross_entropy",
        "fpdt_layer",
        "layer",
        "tiled",
        "tiled_decoder",
    ),
    names={
        "DistributedAttention": "deepspeed.sequence.layer:DistributedAttention",
        "SPModelInfo": "deepspeed.sequence.auto_wrap:SPModelInfo",
        "UlyssesSPAttentionHF": "deepspeed.sequence.hugging_face:UlyssesSPAttentionHF",
        "UlyssesSPDataLoaderAdapter": "deepspeed.sequence.data:UlyssesSPDataLoaderAdapter",
        "auto_wrap_model_for_sp": "deepspeed.sequence.auto_wrap:auto_wrap_model_for_sp",
        "detect_model_sp_info": "deepspeed.sequence.auto_wrap:detect_model_sp_info",
        "mean_over_sequence": "deepspeed.sequence.loss:mean_over_sequence",
        "own_part": "deepspeed.sequence.data:own_part",
        "pad_batch": "deepspeed.sequence.data:pad_batch",
    },
)
