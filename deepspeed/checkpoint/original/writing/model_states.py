"""The original's model-state files made from any source.

    mp_rank_00_model_states.pt                  weights and buffers in the model's types (ZeRO stage 0 to 2)
    zero_pp_rank_00_mp_rank_00_model_states.pt  buffers, shards of frozen parameters, empty parameters (ZeRO stage 3)
                                                both: counters, schedule, shapes, ties, config, the user's own keys

Elements are streamed when a file is written. Does not live here: optimizer files. Called by the converters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.constants import (
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)
from deepspeed.checkpoint.original.engine_state import ENGINE_KEYS
from deepspeed.checkpoint.original.pickles import StreamedTensor
from deepspeed.checkpoint.original.writing.weights import Weights
from deepspeed.checkpoint.source import CheckpointSource
from deepspeed.errors import CheckpointError

__all__ = ["LAYOUT_VERSION", "model_file", "model_states_of", "sharded_model_states_of", "streamed"]

LAYOUT_VERSION = "0.19.8"
"""Version of the original whose layout is written; its reader asks for one."""


def model_file(data_rank: int | None = None) -> str:
    """Name of the model-state file of the only model-parallel rank; of one data-parallel rank at ZeRO stage 3."""
    name = "mp_rank_00_model_states.pt"
    return name if data_rank is None else f"zero_pp_rank_{data_rank}_{name}"


def model_states_of(source: CheckpointSource, weights: Weights) -> dict[str, Any]:
    """Content of a model-state file of ZeRO stages 0 to 2 without the optimizer.

    Raises:
        CheckpointError: a key of the client state is one of the engine's.
    """
    module = OrderedDict(
        (name, streamed(source, weights.tensors[name], weights.dtypes[name]))
        for name in [*weights.buffers, *weights.trained, *weights.frozen]
    )
    fragments = OrderedDict((name, module[name]) for name in weights.frozen)
    return _model_states(source, weights, module, fragments)


def sharded_model_states_of(source: CheckpointSource, weights: Weights, data_rank: int, world_size: int) -> dict[str, Any]:
    """Content of the model-state file of one data-parallel rank at ZeRO stage 3.

    Raises:
        CheckpointError: a key of the client state is one of the engine's.
    """
    module: OrderedDict[str, Any] = OrderedDict(
        (name, streamed(source, weights.tensors[name], weights.dtypes[name])) for name in weights.buffers
    )
    module.update((name, torch.empty(0, dtype=weights.dtypes[name])) for name in [*weights.trained, *weights.frozen])
    fragments = OrderedDict(
        (name, _shard(source, weights.tensors[name], weights.dtypes[name], data_rank, world_size)) for name in weights.frozen
    )
    return _model_states(source, weights, module, fragments)


def streamed(source: CheckpointSource, tensor: str, dtype: torch.dtype) -> StreamedTensor:
    """A tensor of the source, read while it is written."""

    def fill(start: int, out: Tensor) -> None:
        source.read(tensor, start, out=out)

    return StreamedTensor(source.shape(tensor), dtype, fill)


def _shard(source: CheckpointSource, tensor: str, dtype: torch.dtype, rank: int, world_size: int) -> StreamedTensor:
    """Shard `rank` of the flattened tensor, padded with zeros to equal shards."""
    numel = torch.Size(source.shape(tensor)).numel()
    shard_numel = -(-numel // world_size)

    def fill(start: int, out: Tensor) -> None:
        begin = rank * shard_numel + start
        length = max(0, min(out.numel(), numel - begin))
        if length:
            source.read(tensor, begin, out=out[:length])
        out[length:].zero_()

    return StreamedTensor((shard_numel,), dtype, fill)


def _model_states(
    source: CheckpointSource, weights: Weights, module: OrderedDict[str, Any], fragments: OrderedDict[str, Any]
) -> dict[str, Any]:
    state = source.state
    for alias, owner in state["shared_parameters"].items():
        if owner in module:
            module[alias] = module[owner]
    shape_of: Callable[[str], torch.Size] = partial(_shape, source, weights)
    return {
        "module": module,
        "buffer_names": weights.buffers,
        "optimizer": None,
        "param_shapes": [OrderedDict((name, shape_of(name)) for name in group) for group in weights.groups],
        "frozen_param_shapes": OrderedDict((name, shape_of(name)) for name in weights.frozen),
        "shared_params": dict(state["shared_parameters"]),
        "frozen_param_fragments": fragments,
        "lr_scheduler": None if state["lr_scheduler"] is None else dict(state["lr_scheduler"]),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": state["skipped_steps"],
        "global_steps": state["global_steps"],
        "global_samples": state["global_samples"],
        "dp_world_size": state["dp_world_size"],
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": _plain(state["ds_config"]),
        "ds_version": LAYOUT_VERSION,
        UNIVERSAL_CHECKPOINT_INFO: {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE},
        **_client_keys(source),
    }


def _shape(source: CheckpointSource, weights: Weights, name: str) -> torch.Size:
    return torch.Size(source.shape(weights.tensors[name]))


def _client_keys(source: CheckpointSource) -> dict[str, Any]:
    """The client state, which lies beside the engine's keys in this layout."""
    client = source.client_state()
    taken = sorted(key for key in client if key in ENGINE_KEYS)
    if taken:
        raise CheckpointError(
            f"client_state of {source.folder} has {', '.join(map(repr, taken))}, which the original keeps for itself: in "
            "its files the client's keys lie beside its own. Save again with other keys."
        )
    return client


def _plain(value: Any) -> Any:
    """Configuration with plain containers, as JSON has them."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
