"""What the original keeps besides tensors, in our terms: plain dictionaries in, `EngineState` and its parts out.

    *_model_states.pt    counters, schedule, config, names of shared weights, the user's own keys
    an optimizer shard, or a universal folder's optimizer_state.pt    hyperparameters, loss scale

Does not live here: files and tensors (`reading.stages`, `reading.universal`). Both sources call it; pure.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from deepspeed.checkpoint.source import EngineState, OptimizerState
from deepspeed.precision.loss_scaler import state_from_published

__all__ = [
    "ENGINE_KEYS",
    "accumulation_steps_of",
    "client_state_of",
    "engine_state_of",
    "group_members",
    "loss_scaler_of",
    "plain_groups",
    "shared_parameters_of",
    "zero_stage_of",
]

ENGINE_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "universal_checkpoint_info",
        "universal_checkpoint_version",
        "num_experts",
        "ds_autoep_layers",
        "autoep_layers",
        "folding",
    }
)
"""Top-level keys of a model-state file that are the engine's; every other key is the user's."""


def client_state_of(model_states: Mapping[str, Any]) -> dict[str, Any]:
    """The user's own values, copied: nothing of them lies in a mapped file any more."""
    return {key: copy.deepcopy(value) for key, value in model_states.items() if key not in ENGINE_KEYS}


def engine_state_of(
    model_states: Sequence[Mapping[str, Any]],
    *,
    frozen_parameters: list[str],
    has_frozen_parameters: bool,
    optimizer: OptimizerState | None,
    loss_scaler: Mapping[str, Any],
) -> EngineState:
    """The engine's state from the model-state files of a checkpoint (all of them, or one of each kind; at least one).

    Counters are the first file's: they are equal in all. Names of buffers and shared weights are those of all files.
    """
    first = model_states[0]
    ds_config = first.get("ds_config")
    global_steps = int(first.get("global_steps") or 0)
    return {
        "global_steps": global_steps,
        "global_samples": int(first.get("global_samples") or 0),
        "skipped_steps": int(first.get("skipped_steps") or 0),
        "micro_steps": global_steps * accumulation_steps_of(ds_config, int(first.get("dp_world_size") or 1)),
        "dp_world_size": int(first.get("dp_world_size") or 1),
        "zero_stage": zero_stage_of(ds_config),
        "ds_config": ds_config if isinstance(ds_config, Mapping) else None,
        "shared_parameters": shared_parameters_of(model_states),
        "frozen_parameters": frozen_parameters,
        "has_frozen_parameters": has_frozen_parameters,
        "buffers": list(dict.fromkeys(name for states in model_states for name in states.get("buffer_names") or ())),
        "extra_state": extra_state_of(model_states),
        "optimizer": optimizer,
        "loss_scaler": loss_scaler,
        "lr_scheduler": first.get("lr_scheduler"),
        "data": None,
    }


def extra_state_of(model_states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What modules keep besides tensors: module name -> value, from the entries that torch names `_extra_state`."""
    entries = ((name, value) for states in model_states for name, value in (states.get("module") or {}).items())
    return {name.rpartition(".")[0]: value for name, value in entries if is_extra_state(name)}


def plain_module(model_states: Mapping[str, Any]) -> dict[str, Tensor]:
    """The parameters and buffers of a model-state file, without what modules keep besides them."""
    entries = (model_states.get("module") or {}).items()
    return {name: value for name, value in entries if isinstance(value, Tensor) and not is_extra_state(name)}


def is_extra_state(name: str) -> bool:
    """Whether an entry of a state dict is what a module keeps besides its parameters and buffers."""
    return name.rpartition(".")[2] == "_extra_state"


def accumulation_steps_of(ds_config: Any, dp_world_size: int) -> int:
    """Micro-batches per global step: as configured, else what the batch sizes leave, else 1."""
    config = ds_config if isinstance(ds_config, Mapping) else {}
    stated, train, micro = (
        config.get(key) for key in ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
    )
    if isinstance(stated, int):
        return stated
    if isinstance(train, int) and isinstance(micro, int):
        return max(1, train // (micro * dp_world_size))
    return 1


def zero_stage_of(ds_config: Any) -> int:
    """ZeRO stage that a configuration asks for."""
    block = ds_config.get("zero_optimization") if isinstance(ds_config, Mapping) else None
    stage = block.get("stage") if isinstance(block, Mapping) else None
    return stage if isinstance(stage, int) else 0


def shared_parameters_of(model_states: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Tied parameters: later names -> the name under which the tensor is stored, from every file that knows of any."""
    shared: dict[str, str] = {}
    for states in model_states:
        shared.update(states.get("shared_params") or {})
    return shared


def loss_scaler_of(shard: Mapping[str, Any]) -> dict[str, Any]:
    """State for `precision.loss_scaler` from an optimizer's dictionary; empty where it has no scaler, or that of scale 1.

    The latter is what fp32 and bf16 training keep; taken as a state it would become the scale of a later fp16 training.
    """
    stored = shard.get("loss_scaler")
    if stored is None:
        return {}
    fields = vars(stored)
    if not fields.get("dynamic") and float(fields.get("cur_scale", 1.0)) == 1.0:
        return {}
    return state_from_published(fields)


def plain_groups(param_groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Hyperparameters of each group, without the list of parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in param_groups]


def group_members(param_shapes: Sequence[Sequence[Mapping[str, Any]]], group_count: int) -> list[list[str]]:
    """Names of the parameters of each group, in order.

    Args:
        param_shapes: for each model-state file its list of name -> shape, one entry per group (ZeRO stage 3: sub-group).
        group_count: parameter groups of the optimizer.

    Returns:
        One list per group; none where several groups were cut into sub-groups: nothing says where each ends.
    """
    members: list[dict[str, None]] = [{} for _ in range(group_count)]
    for entries in param_shapes:
        if group_count != 1 and len(entries) != group_count:
            return []
        for number, entry in enumerate(entries):
            members[min(number, group_count - 1)].update(dict.fromkeys(entry))
    return [list(names) for names in members]
