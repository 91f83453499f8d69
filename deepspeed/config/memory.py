"""Blocks about where bytes rest besides ZeRO: `activation_checkpointing`, `aio`.

Lives here: keys and defaults. Does not live here: recomputing (`activations`), reading and writing (`ops.aio`, `offload`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from deepspeed.config.base import ConfigModel
from deepspeed.config.faults import Refusal
from deepspeed.config.values import PositiveWhole

__all__ = ["ActivationCheckpointingConfig", "AioConfig"]


class ActivationCheckpointingConfig(ConfigModel):
    """`activation_checkpointing`: what `deepspeed.checkpointing.configure` reads; by itself it switches nothing on."""

    partition_activations: bool = False
    """Shard saved inputs over the model-parallel ranks."""

    contiguous_memory_optimization: bool = False
    """Save inputs into buffers made once; needs `partition_activations` and `number_checkpoints`."""

    cpu_checkpointing: bool = False
    """Move saved inputs to host memory."""

    number_checkpoints: PositiveWhole | None = None
    """Checkpointed layers, which sizes the buffers; > 0."""

    synchronize_checkpoint_boundary: bool = False
    """Wait for the device at both ends of each checkpointed part."""

    profile: bool = False
    """Time forward and backward of each checkpointed part."""

    def check(self) -> Iterable[Refusal]:
        """Buffers need to know what they hold."""
        if self.contiguous_memory_optimization and not (self.partition_activations and self.number_checkpoints):
            yield Refusal(
                "contiguous_memory_optimization",
                "needed partition_activations = true and number_checkpoints with it",
                "Set both, or leave it out.",
            )


class AioConfig(ConfigModel):
    """`aio`: how files of the NVMe tiers are read and written; read only when something rests there.

    `ds_nvme_tune` finds the best values for a disk and prints this block.
    """

    spellings: ClassVar = {"thread_count": "intra_op_parallelism"}

    block_size: PositiveWhole = 1_048_576
    """Bytes that are asked of the system at a time, rounded up to whole pages of 4096; > 0."""

    queue_depth: PositiveWhole = 8
    """Blocks in flight for each thread; > 0."""

    intra_op_parallelism: PositiveWhole = 1
    """Threads that submit blocks and collect results; they share the blocks of every read and write; > 0."""

    single_submit: bool = False
    """Hand blocks to the system one at a time, not as many as there is room for."""

    overlap_events: bool = True
    """Submit the next block as soon as one is done; false waits until all in flight are."""

    use_gds: bool = False
    """Move bytes between NVMe and the GPU directly (GPUDirect Storage)."""
