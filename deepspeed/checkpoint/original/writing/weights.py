"""A source's weights by kind: what the original's files keep apart and a `CheckpointSource` does not.

    trained     in a group of the optimizer: has a master and moments      --> param_shapes
    frozen      parameters that did not require gradients                  --> frozen_param_shapes
    buffers     persistent ones                                            --> buffer_names

Does not live here: files. Called by the converters; opens no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.checkpoint.disk.names import master_tensor, module_tensor
from deepspeed.checkpoint.source import CheckpointSource

__all__ = ["Weights", "config_dtype", "sort_weights"]


@dataclass(frozen=True)
class Weights:
    """Names by kind. A name's tensor in the source, of the highest precision there is, is `tensors[name]`."""

    groups: list[list[str]]
    """Trained parameters of each group of the optimizer, in its order; one group where the source does not tell."""

    frozen: list[str]
    buffers: list[str]

    tensors: dict[str, str]
    """Every weight and buffer -> tensor of the source."""

    dtypes: dict[str, torch.dtype]
    """Every weight and buffer -> its type in the model."""

    @property
    def trained(self) -> list[str]:
        """Trained parameters of all groups."""
        return [name for group in self.groups for name in group]


def sort_weights(source: CheckpointSource) -> Weights:
    """Sort what a source stores by kind. Weights that were trained but are in no group of the optimizer count as frozen."""
    state = source.state
    in_module = {tensor.removeprefix(module_tensor("")): tensor for tensor in source.names(module_tensor(""))}
    masters = {tensor.removeprefix(master_tensor("")): tensor for tensor in source.names(master_tensor(""))}
    tensors = {**in_module, **masters}
    buffers = [name for name in state["buffers"] if name in tensors]
    frozen = [name for name in state["frozen_parameters"] if name in tensors]
    others = [name for name in tensors if name not in {*buffers, *frozen, *state["shared_parameters"]}]
    members = [] if state["optimizer"] is None else state["optimizer"]["members"]
    groups = [[name for name in group if name in tensors] for group in members] or [others]
    grouped = {name for group in groups for name in group}
    model_dtype = config_dtype(state["ds_config"])
    return Weights(
        groups=groups,
        frozen=[*frozen, *(name for name in others if name not in grouped)],
        buffers=buffers,
        tensors=tensors,
        dtypes={name: source.dtype(in_module[name]) if name in in_module else model_dtype for name in tensors},
    )


def config_dtype(ds_config: Mapping[str, Any] | None) -> torch.dtype:
    """The model's type that a configuration asks for."""
    for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        block = (ds_config or {}).get(key)
        if isinstance(block, Mapping) and block.get("enabled") is True:
            return dtype
    return torch.float32
