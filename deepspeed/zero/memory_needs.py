"""`estimate_zero2_...` and `estimate_zero3_...`: tables of the memory that model states need, before a run is started.

    a live model, or its parameter count ---> rows (options, bytes per host, bytes per device) ---> standard output

Lives here: which options are compared, counting, the text. Does not live here: the formula (`sharding.estimate`). Called by
clients, from the paths of the original's stage modules. What an engine of ours holds, `deepspeed.plan` tells.

    option                          a device holds                        a host holds, for its node's ranks
    nothing offloaded               what the stage leaves of all three    the model while it is built
    optimizer state offloaded       parameters                            optimizer state and gradients
    parameters offloaded too        the largest layer, with gradients     all three
    model built without zero.Init   the same                              at least a whole fp32 model per rank

A host's figures are multiplied by `additional_buffer_factor`, for what else a process needs.

[Note: the published figures] People compare these numbers with published tables, so they are the original's to the byte
(measured, version 0.19.8). It counts sharded gradients in fp32, 18 bytes per parameter in all; at stage 2 without offload in
16 bits besides; and with offload a host of stage 2 for the ranks of all nodes, which is too much where there are several.
With gradients in 16 bits, as the engine holds them by default, the paper's 16 bytes are `sharding.estimate.model_states`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from deepspeed.sharding.estimate import GRADIENT_NBYTES, OPTIMIZER_NBYTES, PARAMETER_NBYTES, ModelStates, model_states
from deepspeed.zero.shard import whole_shape

__all__ = [
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]

_WHOLE_NBYTES = 4  # a parameter before anything is cast
_SHARDED_GRADIENT_NBYTES = 4  # [Note: the published figures]
_GIB = 2**30


class _Row(NamedTuple):
    options: str
    host_nbytes: float
    device_nbytes: float


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes `(per host, per device)` of a model of `total_params` parameters at ZeRO stage 2.

    Args:
        total_params: parameters of the model.
        num_gpus_per_node: ranks of a node.
        num_nodes: nodes.
        cpu_offload: optimizer state and gradients rest on the host.
        additional_buffer_factor: host memory for one byte that is counted.
    """
    ranks = num_gpus_per_node * num_nodes
    states = _states(total_params, 2, ranks)
    if cpu_offload:
        offloaded = (states.optimizer_nbytes + states.gradient_nbytes) * ranks  # [Note: the published figures]
        host = max(_WHOLE_NBYTES * total_params * ranks, offloaded)
        return int(host * additional_buffer_factor), int(states.parameter_nbytes)
    host = _WHOLE_NBYTES * total_params * num_gpus_per_node
    return int(host * additional_buffer_factor), int(states.nbytes + GRADIENT_NBYTES * total_params / ranks)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of stage 2 for a model."""
    estimate_zero2_model_states_mem_needs_all_cold(_numel(model), num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of stage 2 for a number of parameters."""
    rows = [
        _Row(
            f"offload_optimizer={_place(offload)}",
            *estimate_zero2_model_states_mem_needs(
                total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
            ),
        )
        for offload in (True, False)
    ]
    _print(2, f"{_millions(total_params)} parameters", num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes `(per host, per device, of the largest layer)` of a model at ZeRO stage 3.

    Args:
        total_params: parameters of the model.
        largest_layer_params: of its largest module without children: it is whole while in use, with its gradients.
        num_gpus_per_node: ranks of a node.
        num_nodes: nodes.
        cpu_offload: optimizer state rests on the host.
        cpu_offload_params: parameters do, too; only together with `cpu_offload`.
        zero_init: the model is built inside `zero.Init`.
        additional_buffer_factor: host memory for one byte that is counted.
    """
    states, of_host = _states(total_params, 3, num_gpus_per_node * num_nodes), _states(total_params, 3, num_nodes)
    layer_nbytes = (PARAMETER_NBYTES + GRADIENT_NBYTES) * largest_layer_params
    whole_nbytes = _WHOLE_NBYTES * num_gpus_per_node * (largest_layer_params if zero_init else total_params)
    if not cpu_offload:
        host, device = float(whole_nbytes), states.nbytes
    else:
        device = 0.0 if cpu_offload_params else states.parameter_nbytes
        host = of_host.nbytes - (0.0 if cpu_offload_params else of_host.parameter_nbytes)
        if not zero_init:
            host = max(host, whole_nbytes)
    return int(host * additional_buffer_factor), int(layer_nbytes + device), layer_nbytes


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of stage 3 for a model, sharded or not."""
    estimate_zero3_model_states_mem_needs_all_cold(
        _numel(model), _largest_layer_numel(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the table of stage 3 for a number of parameters, and that of the largest layer."""
    rows = []
    for offload_params, offload in ((True, True), (False, True), (False, False)):
        for zero_init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                offload,
                offload_params,
                zero_init,
                additional_buffer_factor,
            )
            places = f"offload_param={_place(offload_params)}  offload_optimizer={_place(offload)}"
            rows.append(_Row(f"{places}  zero.Init={'yes' if zero_init else 'no'}", host, device))
    model = f"{_millions(total_params)} parameters, {_millions(largest_layer_params)} of them in the largest layer"
    _print(3, model, num_gpus_per_node, num_nodes, rows)


def _states(numel: int, stage: int, sharers: int) -> ModelStates:
    """What one of `sharers` holds, gradients as in [Note: the published figures]."""
    return model_states(numel, stage, sharers, gradient_nbytes=_SHARDED_GRADIENT_NBYTES)


def _print(stage: int, model: str, num_gpus_per_node: int, num_nodes: int, rows: Iterable[_Row]) -> None:
    lines = [
        f"Parameters, gradients and optimizer state at ZeRO stage {stage}, mixed-precision Adam",
        f"({PARAMETER_NBYTES} + {_SHARDED_GRADIENT_NBYTES} + {OPTIMIZER_NBYTES} bytes per parameter; activations on top)",
        f"{model}; nodes: {num_nodes}, devices per node: {num_gpus_per_node}",
        "  per host | per device | options",
        *(f"{row.host_nbytes / _GIB:7.2f} GB | {row.device_nbytes / _GIB:7.2f} GB | {row.options}" for row in rows),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def _place(is_offloaded: bool) -> str:
    return "cpu " if is_offloaded else "none"


def _millions(numel: int) -> str:
    return f"{numel / 1e6:.1f}M" if numel < 10**8 else f"{round(numel / 1e6)}M"


def _numel(model: nn.Module) -> int:
    return sum(whole_shape(param).numel() for param in model.parameters())


def _largest_layer_numel(model: nn.Module) -> int:
    return max((sum(whole_shape(p).numel() for p in m.parameters(recurse=False)) for m in model.modules()), default=0)
