"""The `zenflow` block in steps and shares: epochs counted out, "auto" decided.

Lives here: the reading of the block. Does not live here: the rhythm it leads to (`zero.zenflow.schedule`). Called by
`zero.zenflow.build`.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.config.zero import ZenFlowConfig
from deepspeed.errors import ArgumentError
from deepspeed.zero.zenflow.schedule import Window

__all__ = ["AUTO_CHOICE_STEPS", "ZenFlowSettings"]

AUTO_CHOICE_STEPS = 100
"""Updates between two choices with select_strategy "auto" where nobody knows how long an epoch is."""


@dataclass(frozen=True)
class ZenFlowSettings:
    """What ZenFlow is to do."""

    topk_ratio: float
    """Part of each matrix' columns that is important."""

    window: Window

    auto_ratio: float
    """See `schedule.is_ripe`."""

    keeps_state_on_host: bool
    """State of the important columns rests in host memory even where there is a device."""

    reserved_share: float
    """Part of this rank's CPU cores that is left to torch while the rest is updated behind training."""

    @classmethod
    def of(cls, block: ZenFlowConfig, loader_steps: int | None = None) -> ZenFlowSettings:
        """Read the block.

        Args:
            block: checked in itself.
            loader_steps: updates in an epoch as the engine's own data loader has it; None: there is none, or it cannot tell.

        Raises:
            ArgumentError: choices are counted in epochs and nobody knows how long one is.
        """
        return cls(
            topk_ratio=block.topk_ratio,
            window=Window(
                warm_up=block.full_warm_up_rounds,
                length=None if block.update_interval == "auto" else int(block.update_interval),
                choice_every=_choice_every(block, block.steps_per_epoch or loader_steps),
                is_behind=block.overlap_step,
            ),
            auto_ratio=block.auto_ratio,
            keeps_state_on_host=block.offload,
            reserved_share=block.pt_reserved_cores_perc,
        )


def _choice_every(block: ZenFlowConfig, epoch_steps: int | None) -> int:
    if block.select_strategy == "step":
        return int(block.select_interval)
    if epoch_steps:
        return epoch_steps * (1 if block.select_interval == "auto" else int(block.select_interval))
    if block.select_strategy == "auto":
        return AUTO_CHOICE_STEPS
    raise ArgumentError(
        f'zero_optimization.zenflow.select_strategy = "epoch" with select_interval {block.select_interval}, but '
        "initialize() was given no training_data, so the length of an epoch is unknown. Set zenflow.steps_per_epoch "
        '(updates, not micro-batches), or use select_strategy "step".'
    )
