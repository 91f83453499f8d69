"""Bytes that a rank sends per optimizer step, and how long that takes. Pure: no torch.

    stage   per optimizer step                              with a micro-batches per step
    0       all-reduce of gradients                         2 G
    1       reduce-scatter + gather of weights              G + W
    2       reduce-scatter in every micro-batch + gather    a G + W
    3       gathers in forward and backward + reduce        a (2 W + G); a (W + G) where weights stay gathered

G and W are bytes of all gradients and weights, each times (ranks - 1) / ranks: what a ring or any other algorithm of the
same volume sends. Source: ZeRO (arXiv:1910.02054), section 7. Called by planners.
"""

from __future__ import annotations

from deepspeed.config import DeepSpeedConfig
from deepspeed.planning.terms import ModelStates

__all__ = ["sent_by", "sent_nbytes", "transfer_seconds"]


def sent_by(states: ModelStates, config: DeepSpeedConfig) -> int:
    """`sent_nbytes` of a setting."""
    stage, steps = config.zero_optimization.stage, config.gradient_accumulation_steps
    return sum(sent_nbytes(stage, *each, steps, stays_gathered=states.stays_gathered) for each in states.moved)


def sent_nbytes(
    stage: int, weight_nbytes: int, gradient_nbytes: int, ranks: int, accumulation: int, *, stays_gathered: bool
) -> int:
    """Bytes that one of `ranks` data-parallel ranks sends per optimizer step.

    Args:
        stage: of ZeRO, 0 to 3.
        weight_nbytes: of all trained weights, whole, in the format in which they are gathered.
        gradient_nbytes: of all gradients, whole, in the format in which they travel.
        ranks: data-parallel (and sequence-parallel) ranks.
        accumulation: micro-batches per optimizer step.
        stays_gathered: at stage 3, weights gathered in forward are still there in backward.
    """
    gathers = accumulation * (1 if stays_gathered else 2) if stage == 3 else 1
    reductions = accumulation if stage >= 2 else 1
    whole = 2 * gradient_nbytes if stage == 0 else gathers * weight_nbytes + reductions * gradient_nbytes
    return whole * (ranks - 1) // ranks


def transfer_seconds(nbytes: int, gigabytes_per_second: float) -> float:
    """How long a rank sends at a bandwidth of one direction, nothing else on the line; 1 GB is 1e9 bytes."""
    return nbytes / (gigabytes_per_second * 1e9)
