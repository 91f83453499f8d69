"""What the config alone settles about training, before anything is laid out: device, precision, batch.

Does not live here: layouts (`partition`), the optimizer (`basic_optimizer`, `training`). Called by `engine.build`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.world import get_local_rank
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.batch import BatchSizes
from deepspeed.engine.accumulation import Accumulation
from deepspeed.engine.loss_guard import LossGuard
from deepspeed.precision.loss_scaler import LossScaler, build_loss_scaler
from deepspeed.precision.policy import DtypePolicy
from deepspeed.topology.mesh import ParallelMesh

__all__ = ["Terms"]


@dataclass(frozen=True)
class Terms:
    """One engine's; the scaler, the accumulation and the guard change as it trains."""

    device: torch.device
    policy: DtypePolicy
    scaler: LossScaler
    batch: BatchSizes
    accumulation: Accumulation
    loss_guard: LossGuard

    @classmethod
    def of(cls, config: DeepSpeedConfig, mesh: ParallelMesh) -> Terms:
        """Those of `config` on this rank's device."""
        device = torch.device(get_accelerator().device_name(get_local_rank()))
        scaler = build_loss_scaler(config, device.type)
        micro, steps = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
        return cls(
            device=device,
            policy=DtypePolicy.from_config(config, device.type, shares_sequences=mesh.axis("sequence").size > 1),
            scaler=scaler,
            batch=BatchSizes(config.train_batch_size, micro, steps),
            accumulation=Accumulation(steps, is_managed=config.managed_gradient_accumulation),
            loss_guard=LossGuard(scaler),
        )
