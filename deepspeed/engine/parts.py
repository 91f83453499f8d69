"""What an engine is made of, chosen by `engine.build`.

Does not live here: anything that runs. The engine and its mixins read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from deepspeed.config import DeepSpeedConfig
from deepspeed.config.batch import BatchSizes
from deepspeed.engine.accumulation import Accumulation
from deepspeed.engine.checkpointing import Checkpointing
from deepspeed.engine.cuts import Cuts
from deepspeed.engine.loss_guard import LossGuard
from deepspeed.engine.partition import Partition
from deepspeed.engine.report import StepReport
from deepspeed.engine.same_inputs import SameInputs
from deepspeed.engine.stage import Stage
from deepspeed.topology.mesh import ParallelMesh
from deepspeed.zero.coordinator import ParameterCoordinator
from deepspeed.zero.optimizer import ZeroOptimizer
from deepspeed.zero.reducer import GradientReducer
from deepspeed.zero.small import WholeParameters


@dataclass
class EngineParts:
    """The parts by role. `reducer`, `optimizer` and `basic_optimizer` are None together: nothing is trained."""

    module: nn.Module
    config: DeepSpeedConfig
    mesh: ParallelMesh
    device: torch.device
    batch: BatchSizes
    accumulation: Accumulation
    loss_guard: LossGuard
    report: StepReport
    communication_data_type: torch.dtype
    partition: Partition
    checkpointing: Checkpointing
    stage: Stage
    of_experts: Callable[[str], bool]
    """Tells the names of what other ranks hold other experts in the place of."""

    cuts: Cuts
    """What is a part of a larger tensor."""

    same_inputs: SameInputs
    """Asks whether tensor-parallel ranks see the same data."""

    products: Callable[[], AbstractContextManager[object]]
    """What forward runs in, so that its matrix products take the faster library."""

    coordinator: ParameterCoordinator | None = None
    """Gathers and releases sharded parameters; None where there are none."""

    optimizer: ZeroOptimizer | None = None
    reducer: GradientReducer | None = None
    small: tuple[WholeParameters, ...] = ()
    """Who keeps the small parameters of stage 3."""

    basic_optimizer: Optimizer | None = None
    client_optimizer: Any = None
    lr_scheduler: Any = None
    client_lr_scheduler: Any = None
    dataloader: Any = None
    collate_fn: Any = None
    mpu: Any = None
    input_dtype: torch.dtype | None = None
    """Floating inputs are cast to this (`fp16.auto_cast`)."""

    autocast_dtype: torch.dtype | None = None
    unmanaged: tuple[nn.Parameter, ...] = ()
    """Trainable parameters outside the optimizer: their gradients are dropped at each step."""

    frozen: dict[str, nn.Parameter] = dataclasses.field(default_factory=dict)
    """Parameters that did not require gradients at the start, by name."""

    def require_owned(self) -> None:
        """Raise UsageError where a newer engine has taken parameters over."""
        for flat in self.partition.flats:
            flat.require_owned()

    def without_training(self) -> EngineParts:
        """The same parts after `engine.destroy()`."""
        return dataclasses.replace(
            self,
            partition=dataclasses.replace(self.partition, trained=(), frozen=(), units=()),
            coordinator=None,
            optimizer=None,
            reducer=None,
            basic_optimizer=None,
            unmanaged=(),
            frozen={},
        )
