"""Published functions that spell the original's file names; `original.files` is the other way.

Called by users through `deepspeed.checkpoint` and `deepspeed.checkpoint.utils`.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["get_layer_ckpt_name_for_rank", "get_model_ckpt_name_for_rank", "get_zero_ckpt_name_for_rank"]


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """File of one tensor rank's slice of a layer, e.g. `layer_03-model_01_model_states.pt` for `layer_03` and 1."""
    return str(Path(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt"))


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """File of a model-parallel rank's model states, e.g. `mp_rank_01_model_states.pt` for `01`."""
    return str(Path(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt"))


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """File of a rank's optimizer shard, without the prefix `bf16_` that bf16 training puts before it."""
    return str(Path(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"))
