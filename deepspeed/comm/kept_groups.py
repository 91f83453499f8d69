"""Process groups that outlive the engine that asked for them: the next one over the same ranks gets the same group.

A group costs a meeting of all ranks when it is made, and threads and connections for as long as the process group of all
ranks lives; a process that makes engine after engine (a search over settings, a notebook) would collect them. Traffic of
two engines over one group is kept apart by its order, as it is in the group of all ranks.

Does not live here: making groups without keeping them (`places.new_group`). Called by `topology`, `pipe`, `tensor_parallel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from deepspeed.comm.places import get_world_group, new_group

__all__ = ["kept_group"]

_Key = tuple[tuple[int, ...], str, bool]


@dataclass
class _Kept:
    """The groups made beside one group of all ranks; another one makes its own."""

    world: dist.ProcessGroup | None = None
    groups: dict[_Key, dist.ProcessGroup] = field(default_factory=dict)


_kept = _Kept()


def kept_group(ranks: Sequence[int], use: str = "", *, is_local: bool = False) -> dist.ProcessGroup:
    """Return the group of these ranks for this use: made when first asked for, the same one after that.

    Args:
        ranks: global ranks, in order.
        use: what it carries. Traffic that must not queue behind other traffic of the same ranks has a name of its own.
        is_local: only its members call; else every rank of the world must, in the same order as for other groups.

    Raises:
        NotInitializedError: there is no process group.
    """
    world = get_world_group()
    if _kept.world is not world:
        _kept.world, _kept.groups = world, {}
    key = (tuple(ranks), use, is_local)
    group = _kept.groups.get(key)
    if group is None:
        options = {"use_local_synchronization": True} if is_local else {}
        group = _kept.groups[key] = new_group(list(ranks), **options)
    return group
