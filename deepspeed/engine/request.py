"""What `deepspeed.initialize` was asked for, resolved. Read by `engine.build` and the files it is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.stage import Stage
from deepspeed.topology.mesh import ParallelMesh

__all__ = ["EngineRequest"]


@dataclass(frozen=True)
class EngineRequest:
    """A model and how it is to be trained: the config is checked, the places of the ranks are known."""

    module: nn.Module
    config: DeepSpeedConfig
    mesh: ParallelMesh
    optimizer: Any = None
    model_parameters: list[Any] | None = None
    training_data: Any = None
    lr_scheduler: Any = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    mpu: Any = None
    restarts: int = 0
    """How often an elastic launcher has started the ranks anew: for the run log."""

    plan: Mapping[str, int] | None = None
    """Term of the memory plan -> bytes per rank, where it is known: for the run log."""

    host_nbytes: int | None = None
    """What the process held beside the module before the engine was built: for the run log."""

    @cached_property
    def stage(self) -> Stage:
        """The module's place in a pipeline, if it has one."""
        return Stage.of(self.module)
