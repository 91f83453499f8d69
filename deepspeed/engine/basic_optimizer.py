"""The torch optimizer inside an engine, and its schedule: the caller's, or the config's.

Does not live here: making one (`optim`), masters and the engine's own optimizer (`training`). Called by `engine.build`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.engine.request import EngineRequest
from deepspeed.engine.tiers import check_offloaded, is_offloaded
from deepspeed.errors import ArgumentError
from deepspeed.optim import build_optimizer, build_scheduler, check_shardable, client_optimizer, client_scheduler
from deepspeed.optim.build import LRSchedule

__all__ = ["BasicOptimizer", "choose_optimizer", "choose_schedule"]


class BasicOptimizer(NamedTuple):
    """An optimizer that can train at the ZeRO stage and in the tier that the config asks for."""

    optimizer: Optimizer
    may_cut: bool
    """Whether it may be handed ranges that cut and join parameters."""


def choose_optimizer(request: EngineRequest) -> BasicOptimizer | None:
    """The one to train with; None: nothing is trained.

    Raises:
        ArgumentError, ConfigError: there is one, and it cannot train with this config; the text has the reason.
    """
    optimizer = _given_or_built(request)
    if optimizer is None:
        return None
    stage = request.config.zero_optimization.stage
    may_cut = check_shardable(
        optimizer,
        stage=stage,
        shard_world_size=request.mesh.zero_group.size if stage >= 1 else 1,
        allows_untested=request.config.zero_allow_untested_optimizer,
    )
    check_offloaded(optimizer, request.config, is_clients=request.optimizer is not None, may_cut=may_cut)
    return BasicOptimizer(optimizer, may_cut)


def _given_or_built(request: EngineRequest) -> Optimizer | None:
    optimizer, block, parameters = request.optimizer, request.config.optimizer, request.model_parameters
    names: dict[Tensor, str] = {param: name for name, param in request.module.named_parameters()}
    if parameters is None:
        parameters = [param for param in names if param.requires_grad]
    if not parameters and request.mesh.axis("pipe").size > 1:
        return _without_parameters(request)
    if optimizer is not None:
        return client_optimizer(optimizer, parameters, names=names)
    if block is None or not parameters:
        return None
    zero = request.config.zero_optimization
    return build_optimizer(
        block,
        parameters,
        on_host=is_offloaded(request.config),
        for_zenflow=zero.zenflow is not None and zero.stage > 0,
        names=names,
    )


def _without_parameters(request: EngineRequest) -> Optimizer | None:
    """That of a pipeline stage with nothing to train: it takes part in norm, loss scale and schedule as all stages do."""
    held = [torch.nn.Parameter(torch.empty(0))]  # torch makes no optimizer without any
    made = _given_or_built(replace(request, model_parameters=held))
    for group in made.param_groups if made is not None else ():
        group["params"] = [param for param in group["params"] if param is not held[0]]
    return made


def choose_schedule(request: EngineRequest, optimizer: Optimizer | None) -> LRSchedule | None:
    """The schedule of `optimizer`'s rates, if one is asked for.

    Raises:
        ArgumentError: the caller gave one, and nothing is trained.
    """
    scheduler, block = request.lr_scheduler, request.config.scheduler
    if optimizer is None:
        if scheduler is not None:
            raise ArgumentError(
                "initialize(lr_scheduler=...) without an optimizer: there are no rates. Give it an optimizer."
            )
        return None
    if scheduler is not None:
        return client_scheduler(scheduler, optimizer)
    return build_scheduler(block, optimizer) if block is not None else None
