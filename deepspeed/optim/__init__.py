"""Optimizers, their learning-rate schedules, and gradient clipping.

`build` chooses (the only place), `schedules` and `rates` move learning rates, `elementwise` says which optimizers may be
handed flat slices, `shardable` which may train on shards, `clip` measures and limits gradients. The optimizers of our own
live in `deepspeed.ops`.
"""

from deepspeed.optim.build import (
    build_optimizer,
    build_scheduler,
    client_optimizer,
    client_scheduler,
    parameter_groups,
)
from deepspeed.optim.clip import clip_grad_norm_, get_global_norm, get_grad_norm
from deepspeed.optim.elementwise import is_elementwise
from deepspeed.optim.schedules import VALID_LR_SCHEDULES
from deepspeed.optim.shardable import check_shardable

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
