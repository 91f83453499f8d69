"""Blocks about where bytes rest besides ZeRO: `activation_checkpointing`, `aio`.

Lives here: keys and defaults. Does not live here: recomputing (`activations`), reading and writing (`ops.aio`, `offload`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

from pydantic import Field

from deepspeed.config.base import ConfigModel
from deepspeed.config.faults import NVME_NEEDS_A_PLACE, Refusal
from deepspeed.config.values import FilePath, PositiveWhole

__all__ = ["ActivationCheckpointingConfig", "ActivationOffloadConfig", "AioConfig"]


class ActivationOffloadConfig(ConfigModel):
    """`activation_checkpointing.offload`: where inputs of checkpointed parts rest between forward and backward."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """On the device, in host memory (on a CPU that is the same, and nothing moves), or in a file. The latest part's
    inputs stay on the device: backward begins with them."""

    nvme_path: FilePath = None
    """Directory on the NVMe device; required when `device` is `nvme`. Each process has a folder of its own there, removed
    at its end, or after a kill by the next start."""

    buffer_count: PositiveWhole = 2
    """Parts whose inputs may be on their way out at once, and parts whose inputs are brought back early; > 0."""

    min_numel: PositiveWhole = 4096
    """Elements from which an input is moved; smaller ones stay on the device. > 0."""

    pin_memory: bool = True
    """Use page-locked host memory on an accelerator: copies run beside the computation."""

    def check(self) -> Iterable[Refusal]:
        """NVMe needs a place."""
        if self.device == "nvme" and self.nvme_path is None:
            yield NVME_NEEDS_A_PLACE


class ActivationCheckpointingConfig(ConfigModel):
    """`activation_checkpointing`: how `deepspeed.checkpointing.checkpoint` keeps what checkpointed parts are given.

    The block wraps no layers: the model calls `checkpoint`. `deepspeed.checkpointing.configure` sets the same by
    argument, and wins over the block of an engine's config.
    """

    partition_activations: bool = False
    """Keep each input in shards over the tensor-parallel ranks (of the `mpu`), which all have the same; gathered for
    recomputation."""

    contiguous_memory_optimization: bool = False
    """Keep inputs in buffers made once; needs `partition_activations` and `number_checkpoints`."""

    cpu_checkpointing: bool = False
    """Move inputs to host memory; the same as `offload.device` = "cpu"."""

    number_checkpoints: PositiveWhole | None = None
    """Checkpointed parts that wait for backward at once, which sizes the buffers; > 0."""

    synchronize_checkpoint_boundary: bool = False
    """Wait for the device at both ends of each checkpointed part, in forward and in backward."""

    profile: bool = False
    """Log the milliseconds of forward and backward of each checkpointed part, on rank 0."""

    offload: ActivationOffloadConfig = Field(default_factory=ActivationOffloadConfig)
    """Where inputs rest."""

    def check(self) -> Iterable[Refusal]:
        """Buffers need to know what they hold, and there is one place."""
        if self.contiguous_memory_optimization and not (self.partition_activations and self.number_checkpoints):
            yield Refusal(
                "contiguous_memory_optimization",
                "needed partition_activations = true and number_checkpoints with it",
                "Set both, or leave it out.",
            )
        if self.offload.device == "nvme" and self.contiguous_memory_optimization:
            needed = 'needed another offload.device than "nvme": what rests in a file needs no buffer'
            yield Refusal("contiguous_memory_optimization", needed, "Leave one of the two out.")
        if self.offload.device == "nvme" and self.cpu_checkpointing:
            yield Refusal("cpu_checkpointing", 'needed another offload.device than "nvme"', "Leave one of the two out.")


class AioConfig(ConfigModel):
    """`aio`: how files of the NVMe tiers are read and written; read only when something rests there.

    `ds_nvme_tune` finds the best values for a disk and prints this block.
    """

    spellings: ClassVar[Mapping[str, str]] = {"thread_count": "intra_op_parallelism"}

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
