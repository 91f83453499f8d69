"""Memory that parameters, gradients and optimizer state take, before anything is allocated.

    bytes per parameter      parameters 2   gradients 2   optimizer 12 (fp32 master and two moments)     mixed-precision Adam
    divided by ranks         stage 3        stage 2, 3    stage 1, 2, 3

Lives here: the formula. Does not live here: counting a model's parameters and printing (`zero.memory_needs`); activations,
which no formula knows. Source: ZeRO (arXiv:1910.02054), section 3.1 and figure 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.errors import ArgumentError

__all__ = ["GRADIENT_NBYTES", "OPTIMIZER_NBYTES", "PARAMETER_NBYTES", "ModelStates", "model_states"]

PARAMETER_NBYTES = 2
GRADIENT_NBYTES = 2
OPTIMIZER_NBYTES = 12


@dataclass(frozen=True)
class ModelStates:
    """Bytes on one rank."""

    parameter_nbytes: float
    gradient_nbytes: float
    optimizer_nbytes: float

    @property
    def nbytes(self) -> float:
        """All together."""
        return self.parameter_nbytes + self.gradient_nbytes + self.optimizer_nbytes


def model_states(
    numel: int,
    stage: int,
    world_size: int,
    *,
    parameter_nbytes: float = PARAMETER_NBYTES,
    gradient_nbytes: float = GRADIENT_NBYTES,
    optimizer_nbytes: float = OPTIMIZER_NBYTES,
) -> ModelStates:
    """What each of `world_size` data-parallel ranks holds of a model of `numel` parameters at ZeRO stage `stage`.

    The last three arguments are bytes per parameter. Padding, buffers in flight and gathered parameters come on top.

    Raises:
        ArgumentError: a stage other than 0 to 3, or no rank.
    """
    if stage not in (0, 1, 2, 3) or world_size < 1:
        raise ArgumentError(
            f"model_states(stage={stage}, world_size={world_size}): needed a ZeRO stage of 0 to 3 and at least 1 rank. "
            "Correct them."
        )
    return ModelStates(
        numel * parameter_nbytes / (world_size if stage >= 3 else 1),
        numel * gradient_nbytes / (world_size if stage >= 2 else 1),
        numel * optimizer_nbytes / (world_size if stage >= 1 else 1),
    )
