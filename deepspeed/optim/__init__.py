"""Optimizers, their learning-rate schedules, and gradient clipping.

`build` chooses (the only place), `schedules` and `rates` move learning rates, `elementwise` says which optimizers may be
handed flat slices, `shardable` which may train on shards, `clip` measures and limits gradients. The optimizers of our own
live in `deepspeed.ops`. Names load at first use: `kept` is read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.common.lazy import attach

if TYPE_CHECKING:
    from deepspeed.optim.build import build_optimizer as build_optimizer
    from deepspeed.optim.build import build_scheduler as build_scheduler
    from deepspeed.optim.build import client_optimizer as client_optimizer
    from deepspeed.optim.build import client_scheduler as client_scheduler
    from deepspeed.optim.build import parameter_groups as parameter_groups
    from deepspeed.optim.clip import clip_grad_norm_ as clip_grad_norm_
    from deepspeed.optim.clip import get_global_norm as get_global_norm
    from deepspeed.optim.clip import get_grad_norm as get_grad_norm
    from deepspeed.optim.elementwise import is_elementwise as is_elementwise
    from deepspeed.optim.schedules import VALID_LR_SCHEDULES as VALID_LR_SCHEDULES
    from deepspeed.optim.shardable import check_shardable as check_shardable

__all__ = [
    "VALID_LR_SCHEDULES",
    "build_optimizer",
    "build_scheduler",
    "check_shardable",
    "client_optimizer",
    "client_scheduler",
    "clip_grad_norm_",
    "get_global_norm",
    "get_grad_norm",
    "is_elementwise",
    "parameter_groups",
]

__getattr__, __dir__ = attach(
    __name__,
    names={
        "VALID_LR_SCHEDULES": "deepspeed.optim.schedules:VALID_LR_SCHEDULES",
        "build_optimizer": "deepspeed.optim.build:build_optimizer",
        "build_scheduler": "deepspeed.optim.build:build_scheduler",
        "check_shardable": "deepspeed.optim.shardable:check_shardable",
        "client_optimizer": "deepspeed.optim.build:client_optimizer",
        "client_scheduler": "deepspeed.optim.build:client_scheduler",
        "clip_grad_norm_": "deepspeed.optim.clip:clip_grad_norm_",
        "get_global_norm": "deepspeed.optim.clip:get_global_norm",
        "get_grad_norm": "deepspeed.optim.clip:get_grad_norm",
        "is_elementwise": "deepspeed.optim.elementwise:is_elementwise",
        "parameter_groups": "deepspeed.optim.build:parameter_groups",
    },
)
