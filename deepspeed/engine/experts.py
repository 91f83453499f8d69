"""What an engine must know of experts that are spread over ranks: which parameters and names are theirs.

    expert-parallel rank 0    moe.experts.deepspeed_experts.0, .1       other ranks hold others in their place:
    expert-parallel rank 1    moe.experts.deepspeed_experts.2, .3       other axes (`axes`), other names
    stacked (`moe.auto_ep`)   mlp.experts.gate_up_proj                  other axes, the same names (`cuts`)

Layers with ep_size 1 hold all experts on every rank and are dense here. Names are global (docs/adr/0016), so whatever goes
by name (checkpoints, exports) takes the experts of all ranks for one model's.

Does not live here: the layers (`moe`), the axes (`axes`). Called by `api`, `build`, `partition`, `alike`, `saving`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ArgumentError, UnbuiltFeatureError, UsageError
from deepspeed.moe.auto_ep import SpreadExperts
from deepspeed.moe.experts import Experts, expert_group_name
from deepspeed.moe.param_groups import is_moe_param
from deepspeed.pipe.module import PipelineModule
from deepspeed.topology.groups import set_current
from deepspeed.topology.mesh import ParallelMesh
from deepspeed.zero.leaf import set_z3_leaf_module
from deepspeed.zero.shard import is_sharded

__all__ = [
    "gather_experts_together",
    "is_name_of_experts",
    "moe_layers",
    "name_on_rank",
    "place_experts",
    "refuse_for_experts",
    "spread_experts",
]

_NO_SIZE = 1 << 30


def moe_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers of experts in `module`, by name."""
    yield from ((name, each) for name, each in module.named_modules() if getattr(each, "is_deepspeed_moe_layer", False))


def place_experts(module: nn.Module, mesh: ParallelMesh, *, data_first: bool = False) -> ParallelMesh:
    """Spread the experts of `module` over its data-parallel ranks as its layers ask. Every rank of the world must call it.

    Args:
        module: a model or a stage of a pipeline.
        mesh: without an expert axis.
        data_first: `use_data_before_expert_parallelism`.

    Returns:
        The mesh with it, which is the current one from now on; `mesh` where no experts are spread.

    Raises:
        ArgumentError: layers differ in their ep_size, or it does not divide the data-parallel ranks, or parameters are
            marked as experts that no layer tells of.
        UsageError: an mpu numbers ranks in another order than ours, or experts were made under `zero.Init`.
    """
    _refuse_sharded(module)
    ep_size = _agreed_ep_size(module)
    _refuse_strays(module, spread_experts(module) if ep_size > 1 else set())
    if ep_size > 1:
        mesh = mesh.with_experts(ep_size, is_slowest=data_first)
        set_current(mesh)
    for each in module.modules():
        place = getattr(each, "set_deepspeed_parallelism", None)
        if place is not None:
            place(data_first)
    for _, experts in _spread(module):
        experts.mark()  # a deep copy of a model loses them
    return mesh


def _refuse_sharded(module: nn.Module) -> None:
    for name, experts in _spread(module):
        if any(is_sharded(param) for param in experts.parameters()):
            raise UsageError(
                f"the experts of {name!r} were made under deepspeed.zero.Init, which shards parameters over all ranks; but "
                "with ep_size > 1 few ranks hold the same experts. Make MoE layers outside zero.Init, or with ep_size=1."
            )


def _refuse_strays(module: nn.Module, known: Set[int]) -> None:
    for name, param in module.named_parameters():
        group_name = getattr(param, "group_name", None)
        if is_moe_param(param) and group_name not in (None, expert_group_name(1)) and id(param) not in known:
            raise ArgumentError(
                f"parameter {name!r} is marked as an expert's (allreduce=False, group_name={group_name!r}), but no MoE "
                "layer says over how many ranks experts are spread. Put it into deepspeed.moe.layer.MoE(..., ep_size=...), "
                "or take the marks away."
            )


def _agreed_ep_size(module: nn.Module) -> int:
    """The one that is not 1; of all stages, where `module` is a stage. All ranks raise together."""
    sizes = {int(layer.ep_size) for _, layer in moe_layers(module)} - {1}
    if not sizes and not isinstance(module, PipelineModule):
        return 1
    largest, smallest = max(sizes, default=1), min(sizes, default=_NO_SIZE)
    found = torch.tensor([largest, -smallest], device=get_accelerator().current_device_name())
    comm.all_reduce(found, comm.ReduceOp.MAX)
    largest, smallest = int(found[0]), -int(found[1])
    if smallest not in (largest, _NO_SIZE):
        given = ", ".join(f"{name!r} has {layer.ep_size}" for name, layer in moe_layers(module))
        raise ArgumentError(
            f"MoE layers of one model have ep_size {smallest} and {largest} (on this rank: {given or 'no layers'}). Ranks "
            "have one expert axis: give all layers the same ep_size, or 1, which keeps all experts on every rank. The "
            "number of experts may differ from layer to layer."
        )
    return largest


def refuse_for_experts(config: DeepSpeedConfig) -> None:
    """Refuse what does not work with experts that are spread over ranks; ask only where they are.

    Raises:
        UnbuiltFeatureError: the text says what to do.
    """
    zero = config.zero_optimization
    if zero.stage > 0 and zero.zenflow is not None:
        raise UnbuiltFeatureError(
            "zero_optimization.zenflow with experts that are spread over ranks is not built yet. Leave it out, or give MoE "
            "ep_size=1, which keeps all experts on every rank."
        )


def _spread(module: nn.Module) -> Iterator[tuple[str, Experts | SpreadExperts]]:
    """Those spread over ranks, by every name: a layer that a model uses in two places has two."""
    for name, each in module.named_modules(remove_duplicate=False):
        if isinstance(each, Experts | SpreadExperts) and each.is_spread:
            yield name, each


def spread_experts(module: nn.Module) -> set[int]:
    """Ids of the parameters and buffers that other expert-parallel ranks hold others in the place of."""
    return {id(tensor) for _, experts in _spread(module) for tensor in (*experts.parameters(), *experts.buffers())}


def gather_experts_together(module: nn.Module) -> None:
    """Let all experts of a layer on a rank be one unit of ZeRO stage 3: all ranks gather it, whatever tokens chose."""
    for each in module.modules():
        if isinstance(each, Experts | SpreadExperts):
            set_z3_leaf_module(each, True)


def is_name_of_experts(module: nn.Module) -> Callable[[str], bool]:
    """What tells the names of such parameters, buffers and modules."""
    prefixes = tuple(f"{name}." if name else "" for name, _ in _spread(module))
    return lambda name: name.startswith(prefixes)


def name_on_rank(module: nn.Module) -> Callable[[str], str]:
    """What gives a name as it would be if every rank counted its own experts from 0: alike on all ranks."""
    local: dict[str, str] = {}
    for name, experts in _spread(module):
        if not isinstance(experts, Experts):  # stacked ones have one name on all ranks
            continue
        path = f"{name}.deepspeed_experts." if name else "deepspeed_experts."
        for place, number in enumerate(dict(experts.deepspeed_experts.named_children())):
            local[f"{path}{number}."] = f"{path}{place}."

    def shown(name: str) -> str:
        for prefix, its_place in local.items():
            if name.startswith(prefix):
                return its_place + name[len(prefix) :]
        return name

    return shown
