"""Door to memory reports, seeds, moving batches, gradient norms and cutting lists of layers."""

from __future__ import annotations

from deepspeed.accelerator.memory import see_memory_usage
from deepspeed.accelerator.seeds import set_random_seed
from deepspeed.common.pytree import move_to_device
from deepspeed.optim.clip import clip_grad_norm_, get_global_norm, get_grad_norm
from deepspeed.pipe.partition import partition_balanced, partition_uniform

__all__ = [
    "clip_grad_norm_",
    "get_global_norm",
    "get_grad_norm",
    "move_to_device",
    "partition_balanced",
    "partition_uniform",
    "see_memory_usage",
    "set_random_seed",
]
