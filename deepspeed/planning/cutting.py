"""What the first rank holds of a model that ranks share, for a model without values.

    module --> a copy of it on the meta device --> layers cut over tensor ranks    `tensor_parallel.auto`
                                               --> experts spread over ranks       `moe.auto_ep`, `engine.experts`

All as `initialize` does it. Cut layers and spread experts call collectives. They run among ranks that are only pretended
(`comm.pretended`), on tensors without values, so that what they take is traced with the rest. Only ranks that hold other
parts are pretended: more that hold the same change nothing here. Called by `of_module`.

[Note: balanced routers] How many tokens choose an expert depends on values. Where there are none every expert gets equally
many (`moe.dispatch.rows_of_experts`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from deepspeed.comm.pretended import pretended_world
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.experts import moe_layers, place_experts
from deepspeed.errors import ArgumentError
from deepspeed.moe.auto_ep import apply_auto_ep
from deepspeed.planning.ranks import Ranks
from deepspeed.planning.sources import Subject
from deepspeed.tensor_parallel.auto import cut_without_values
from deepspeed.topology import groups
from deepspeed.topology.mesh import ParallelMesh

__all__ = ["as_first_rank", "current_mesh_kept"]


@contextmanager
def as_first_rank(subject: Subject, config: DeepSpeedConfig, ranks: Ranks) -> Iterator[Subject]:
    """What the first of `ranks` holds of `subject`; inside, there are the ranks that share it.

    Raises:
        ArgumentError: the model cannot be shared so.
        UsageError: this process is a rank of a job.
    """
    spread = _expert_ranks(subject.module, config)
    if ranks.zero % spread:
        raise ArgumentError(
            f"experts are spread over {spread} ranks (ep_size, autoep_size), which does not divide {ranks.zero} "
            "data-parallel ranks. Change --world-size or that size."
        )
    if ranks.tensor * spread == 1 and not config.expert_parallel.enabled:
        yield subject
        return
    with pretended_world(ranks.tensor * spread), current_mesh_kept():
        module = _without_values(subject.module)
        mesh = ParallelMesh.build(tensor=ranks.tensor)
        groups.set_current(mesh)
        if ranks.tensor > 1:
            leaves_experts = config.expert_parallel.enabled
            cut_without_values(module, config.tensor_parallel, mesh.axis("tensor"), leaves_experts=leaves_experts)
        apply_auto_ep(module, config.expert_parallel)
        place_experts(module, mesh)
        yield replace(subject, module=module)


def _expert_ranks(module: nn.Module, config: DeepSpeedConfig) -> int:
    """Over how many ranks experts are spread."""
    block = config.expert_parallel
    return max([int(each.ep_size) for _, each in moe_layers(module)] + [block.autoep_size] * block.enabled, default=1)


@contextmanager
def current_mesh_kept() -> Iterator[None]:
    """Afterwards the process's mesh is the one that it was."""
    before = groups.get_current() if groups.has_current() else None
    try:
        yield
    finally:
        groups.reset()
        if before is not None:
            groups.set_current(before)


def _without_values(module: nn.Module) -> nn.Module:
    """A copy on the meta device."""
    memo: dict[int, object] = {}
    for param in module.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    made: nn.Module = copy.deepcopy(module, memo)
    return made
