"""ZenFlow's masters, chosen and checked. Called by `engine.training`."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from deepspeed.config.zero import ZenFlowConfig
from deepspeed.errors import ArgumentError
from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from deepspeed.zero.flat import FlatGroup
from deepspeed.zero.residence import Residence
from deepspeed.zero.zenflow.settings import ZenFlowSettings
from deepspeed.zero.zenflow.weights import ZenFlowWeights

__all__ = ["zenflow_weights"]


def zenflow_weights(
    flats: Sequence[FlatGroup],
    optimizer: Optimizer,
    block: ZenFlowConfig,
    epoch_steps: int | None,
    *,
    sub_group_numel: int | None = None,
    residence: Residence | None = None,
) -> ZenFlowWeights:
    """Masters with the schedule that `block` asks for.

    Args:
        flats: trained flat groups with their gradient stores, at stage 1, 2 or 3.
        optimizer: the config's, or a client's.
        block: `zero_optimization.zenflow`.
        epoch_steps: updates in an epoch, if the engine can tell.
        sub_group_numel: as `MasterWeights`.
        residence: one that keeps masters and state in memory.

    Raises:
        ArgumentError: another optimizer than Adam on the host, or an epoch of unknown length.
    """
    if not isinstance(optimizer, DeepSpeedCPUAdam):
        raise ArgumentError(
            f"zero_optimization.zenflow with an optimizer of class {type(optimizer).__name__}: it needs DeepSpeedCPUAdam or "
            "ZenFlowCPUAdam. Pass one of them, name Adam or AdamW in the config, or leave zenflow out."
        )
    settings = ZenFlowSettings.of(block, epoch_steps)
    return ZenFlowWeights(flats, optimizer, settings, sub_group_numel=sub_group_numel, residence=residence)
