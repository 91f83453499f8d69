"""Questions about groups and places that move no data, in the shapes of `torch.distributed`; and making groups.

Does not live here: moving data (`collectives`), joining the ranks (`world`). Everyone calls it through `deepspeed.comm`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.collectives import all_gather_into_tensor
from deepspeed.comm.failures import NotInitializedError
from deepspeed.comm.watch import WATCH
from deepspeed.comm.world import current_world

__all__ = [
    "TorchBackend",
    "enable_symm_mem_for_group",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_reduce_scatter_tensor",
    "initialize_mesh_device",
    "is_available",
    "new_group",
]

Group = dist.ProcessGroup | None


def get_rank(group: Group = None) -> int:
    """Return this process's rank in the group (None: the world), -1 outside it."""
    _require_world("get_rank")
    return dist.get_rank(group)


def get_world_size(group: Group = None) -> int:
    """Return the number of ranks in the group (None: the world), -1 outside it."""
    _require_world("get_world_size")
    return dist.get_world_size(group)


def get_world_group() -> dist.ProcessGroup:
    """Return the group of all ranks."""
    _require_world("get_world_group")
    group = dist.group.WORLD
    assert group is not None  # torch has a default group
    return group


def get_all_ranks_from_group(group: Group = None) -> list[int]:
    """Return the global ranks of a group (None: the world), in group order."""
    _require_world("get_all_ranks_from_group")
    return dist.get_process_group_ranks(group)


def get_global_rank(group: Group = None, group_rank: int = 0) -> int:
    """Return the global rank of rank `group_rank` of a group; in the world (None) both are the same."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def new_group(ranks: list[int] | None = None, **options: Any) -> dist.ProcessGroup:
    """Make a group of global ranks (None: all); every rank of the world must call it, in the same order.

    The time-out of `init_distributed` holds for it unless `timeout` is among the options, which are torch's.
    """
    _require_world("new_group")
    options.setdefault("timeout", current_world().timeout)
    everyone = range(dist.get_world_size())
    meeting = ranks if ranks is not None and options.get("use_local_synchronization") else everyone
    group: dist.ProcessGroup = WATCH.together("new_group", list(meeting), lambda: dist.new_group(ranks, **options))
    return group


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """Return a torch `DeviceMesh` over all ranks, on this process's kind of device; every rank must call it.

    Args:
        mesh_shape: size of each dimension; the product is the number of ranks.
        mesh_dim_names: name of each dimension.
    """
    _require_world("initialize_mesh_device")
    kind, shape, names = get_accelerator().device_name(), tuple(mesh_shape), tuple(mesh_dim_names)
    return WATCH.together(
        "initialize_mesh_device",
        range(dist.get_world_size()),
        lambda: init_device_mesh(kind, shape, mesh_dim_names=names),
    )


def _require_world(call: str) -> None:
    if not dist.is_initialized():
        raise NotInitializedError(call)


def is_available() -> bool:
    """True when this build of torch has torch.distributed."""
    return dist.is_available()


def has_all_gather_into_tensor() -> bool:
    """True: every supported torch has it."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """True: every supported torch has it."""
    return True


def has_all_reduce_coalesced() -> bool:
    """True: every supported torch has it."""
    return True


def has_coalescing_manager() -> bool:
    """True: every supported torch has it."""
    return True


def enable_symm_mem_for_group(group_name: str) -> None:
    """Let a group use torch's symmetric memory, which accelerators have and the CPU has not."""
    importlib.import_module("torch.distributed._symmetric_memory").enable_symm_mem_for_group(group_name)


class TorchBackend:
    """What communication benchmarks written for the original ask its back end object."""

    @staticmethod
    def get_all_gather_function() -> Callable[..., Any]:
        """Return the all-gather into one tensor."""
        return all_gather_into_tensor

    @staticmethod
    def has_all_gather_into_tensor() -> bool:
        """True: every supported torch has it."""
        return True
