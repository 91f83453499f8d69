"""`deepspeed.tp_model_init`: what a caller said of a model before `deepspeed.initialize`, which cuts it.

    tp_model_init(model, tp_size=4, dtype=torch.bfloat16) --> recorded --> initialize(model=model, ...) asks `recorded_for`

Lives here: the record and the switch `set_autotp_mode`. Nothing is cut here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from deepspeed.errors import ArgumentError

__all__ = ["Recorded", "is_autotp_training", "recorded_for", "reset", "set_autotp_mode", "tp_model_init"]


@dataclass(frozen=True)
class Recorded:
    """What was said of one model.

    Attributes:
        tp_size: ranks that share each layer.
        dtype: of the weights.
        config: a config with a `tensor_parallel` block, or None.
        tp_group: the ranks, as a process group, or None.
        mpu: an object with groups, or None.
    """

    tp_size: int
    dtype: torch.dtype
    config: Any = None
    tp_group: Any = None
    mpu: Any = None


_records: WeakKeyDictionary[nn.Module, Recorded] = WeakKeyDictionary()


@dataclass
class _Switch:
    is_training: bool = False


_switch = _Switch()


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, **kwargs: Any) -> nn.Module:
    """Say that `deepspeed.initialize` is to cut `model` over `tp_size` ranks; it is returned as it is.

    Args:
        model: whole.
        tp_size: ranks that share each layer.
        dtype: of the weights; the config's precision must agree.
        config: a config with a `tensor_parallel` block.
        **kwargs: `tp_group` or `mpu`: where the ranks are known from. Without, neighbours in rank share.

    Raises:
        ArgumentError: a size below 1, another keyword, both `tp_group` and `mpu`, or another size than was said before.
    """
    unknown = kwargs.keys() - {"tp_group", "mpu"}
    if unknown:
        raise ArgumentError(
            f"tp_model_init got {', '.join(sorted(unknown))}; it takes config, tp_group and mpu. Leave it out."
        )
    if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1:
        raise ArgumentError(f"tp_model_init(tp_size={tp_size!r}): needed a number of ranks, at least 1.")
    if kwargs.get("tp_group") is not None and kwargs.get("mpu") is not None:
        raise ArgumentError("tp_model_init got both tp_group and mpu, which say the same. Give one of the two.")
    made = Recorded(tp_size, dtype, config, kwargs.get("tp_group"), kwargs.get("mpu"))
    before = _records.get(model)
    if before is not None and (before.tp_size, before.dtype) != (tp_size, dtype):
        raise ArgumentError(
            f"tp_model_init(tp_size={tp_size}, dtype={dtype}), but it was called with tp_size={before.tp_size}, "
            f"dtype={before.dtype} for this model before. Call it once."
        )
    _records[model] = made
    return model


def recorded_for(model: nn.Module) -> Recorded | None:
    """What `tp_model_init` was told of a model."""
    return _records.get(model)


def set_autotp_mode(training: bool = False) -> None:
    """Say whether models are cut for training. `deepspeed.initialize` always does; kept for code that asks."""
    _switch.is_training = training


def is_autotp_training() -> bool:
    """What `set_autotp_mode` was told."""
    return _switch.is_training


def reset() -> None:
    """Forget all (tests)."""
    _records.clear()
    _switch.is_training = False
