"""A loss scaler's state as the record that the original's files hold; `engine_state.loss_scaler_of` is the way back.

Does not live here: the record's class (`stand_ins`). Called by the converters; pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepspeed.checkpoint.original.stand_ins import DynamicLossScaler, LossScaler

__all__ = ["scaler_record"]


def scaler_record(state: Mapping[str, Any], ds_config: Mapping[str, Any] | None, iteration: int = 0) -> LossScaler:
    """The record of a fixed scale, or, where `state` counts good steps, of a moving one.

    Args:
        state: of `precision.loss_scaler`; empty for scale 1.
        ds_config: its `fp16` block has the rules of a moving scale.
        iteration: steps so far. The original counts the iteration of the last overflow and grows one step later the first
            time, hence the 2.
    """
    scale = float(state.get("scale", 1.0))
    if "good_steps" not in state:
        return LossScaler(cur_scale=scale, dynamic=False)
    block = (ds_config or {}).get("fp16")
    fp16: Mapping[str, Any] = block if isinstance(block, Mapping) else {}
    hysteresis = int(fp16.get("hysteresis", 2))
    return DynamicLossScaler(
        cur_scale=scale,
        dynamic=True,
        cur_iter=iteration,
        last_overflow_iter=iteration - int(state["good_steps"]) - 2,
        scale_factor=2.0,
        scale_window=int(fp16.get("loss_scale_window", 1000)),
        min_scale=fp16.get("min_loss_scale", 1),
        delayed_shift=hysteresis,
        cur_hysteresis=int(state.get("hysteresis_left", hysteresis)),
        consecutive_hysteresis=bool(fp16.get("consecutive_hysteresis", False)),
        raise_error_at_min_scale=True,
        dtype=torch.float16,
    )
