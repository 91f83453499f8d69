"""Layers cut over tensor-parallel ranks, for a model without values: what the first rank would hold.

    module --> a copy of it on the meta device --> `tensor_parallel.auto`, as an engine does it --> parts

The cut layers call collectives. They run among ranks that are only pretended (`comm.pretended`), on tensors without values,
so that what they take is traced with the rest. Called by `of_module`.
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
from deepspeed.planning.sources import Subject
from deepspeed.tensor_parallel.auto import cut_without_values
from deepspeed.topology.mesh import AxisGroup

__all__ = ["cut_over_tensor_ranks"]


@contextmanager
def cut_over_tensor_ranks(subject: Subject, config: DeepSpeedConfig, ranks: int) -> Iterator[Subject]:
    """What the first of `ranks` holds of `subject`; inside, there are such ranks.

    Raises:
        ArgumentError: the model cannot be cut so.
        UsageError: this process is a rank of a job.
    """
    if ranks == 1:
        yield subject
    else:
        with pretended_world(ranks) as group:
            module = _without_values(subject.module)
            cut_without_values(module, config.tensor_parallel, AxisGroup(range(ranks), 0, group))
            yield replace(subject, module=module)


def _without_values(module: nn.Module) -> nn.Module:
    """A copy on the meta device."""
    memo: dict[int, object] = {}
    for param in module.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    made: nn.Module = copy.deepcopy(module, memo)
    return made
