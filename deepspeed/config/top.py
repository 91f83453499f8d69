"""The keys that stand at the top level of a configuration without a block.

Lives here: those keys, and what they forbid each other. Does not live here: the batch triangle (`config.batch`), blocks
(`config.root`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from deepspeed.common.logging import warn_once
from deepspeed.config.base import ConfigModel
from deepspeed.config.faults import Refusal
from deepspeed.config.values import (
    Cadence,
    Dtype,
    LowerCase,
    NonNegativeNumber,
    NonNegativeWhole,
    PositiveNumber,
    PositiveWhole,
)

__all__ = ["TopLevel"]

_NOT_YET: Any = None
"""Default of the batch sizes: null as JSON has it; after `DeepSpeedConfig` has resolved them, they are ints."""


class TopLevel(ConfigModel):
    """`top level`: keys outside every block."""

    train_batch_size: PositiveWhole = Field(_NOT_YET, validate_default=False)
    """Samples of all ranks per optimizer step: `train_micro_batch_size_per_gpu` x `gradient_accumulation_steps` x
    data-parallel ranks. Give any two of the three; the last follows."""

    train_micro_batch_size_per_gpu: PositiveWhole = Field(_NOT_YET, validate_default=False)
    """Samples per rank and forward."""

    gradient_accumulation_steps: PositiveWhole = Field(_NOT_YET, validate_default=False)
    """Forward and backward passes per optimizer step; 1 when it neither is given nor follows."""

    managed_gradient_accumulation: bool = True
    """The engine counts micro-batches; false makes every `step()` an optimizer step."""

    steps_per_print: Cadence = None
    """Optimizer steps between progress lines; null, 0 and infinity mean never. The first rank's counts for all."""

    dump_state: bool = False
    """Log the engine's settings when it is built."""

    wall_clock_breakdown: bool = False
    """Time forward, backward and step."""

    memory_breakdown: bool = False
    """Log memory use at marked places."""

    dataloader_drop_last: bool = False
    """Drop an incomplete last batch in the loader that the engine builds."""

    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"], LowerCase] | None = None
    """Level of this library's logger, in any case."""

    disable_python_gc: bool = False
    """Collect garbage at fixed places instead of whenever Python likes."""

    gradient_clipping: NonNegativeNumber = 0.0
    """Largest global L2 norm of the gradient; larger ones are scaled down. 0 is off."""

    prescale_gradients: bool = False
    """Divide gradients before they are reduced instead of after."""

    gradient_predivide_factor: PositiveNumber = 1.0
    """Divide gradients by this before they are summed, and by ranks / this after; > 0."""

    gradient_allreduce_op: Annotated[Literal["mean", "sum"], LowerCase] = "mean"
    """How gradients of data-parallel ranks are combined, in any case."""

    communication_data_type: Dtype | None = None
    """Format in which gradients travel: fp16, bf16 or fp32. Left out: the model's."""

    seq_parallel_communication_data_type: Dtype | None = "fp32"
    """The same while sequences are split over ranks."""

    sparse_gradients: bool = False
    """Reduce gradients of embeddings as rows."""

    disable_allgather: bool = False
    """Gather with broadcasts. Accepted; the fastest way is always taken."""

    graph_harvesting: bool = False
    """Record short sequences of kernels as a graph."""

    vocabulary_size: PositiveWhole | None = None
    """Warns when it is no multiple of 8, which matrix units prefer."""

    use_data_before_expert_parallelism: bool = False
    """Neighbouring ranks share data before they share experts."""

    zero_allow_untested_optimizer: bool = False
    """Allow ZeRO with an optimizer that this library does not test with it."""

    zero_force_ds_cpu_optimizer: bool = True
    """With optimizer offload, refuse an optimizer object that is not one of this library's CPU optimizers."""

    sequence_parallel_size: PositiveWhole = 1
    """Ranks that share each sequence; > 0."""

    data_parallel_size: PositiveWhole | None = None
    """Ranks that see different data; with `sequence_parallel_size`, the product is the world size."""

    allgather_size: NonNegativeWhole = 500_000_000
    """Deprecated, not read: write `zero_optimization.allgather_bucket_size`."""

    @classmethod
    def must_fill(cls, field: str) -> bool:
        """Only a client knows these."""
        return field in {
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
        }

    def check(self) -> Iterable[Refusal]:
        """Warn about a vocabulary that matrix units do not like."""
        if self.vocabulary_size is not None and self.vocabulary_size % 8:
            wanted = -(-self.vocabulary_size // 8) * 8
            warn_once(
                "vocabulary_size", "vocabulary_size = %d is no multiple of 8; %d would be", self.vocabulary_size, wanted
            )
        return ()
