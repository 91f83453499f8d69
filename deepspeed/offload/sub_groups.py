"""How much of a rank's state is in memory at once when it rests on a disk: sub-groups, and buffers for some of them.

    shard space   |---- 0 ----|---- 1 ----|---- 2 ----| ... |      sub-groups of `numel` elements
    memory        | 3 tensors of 2 | 3 tensors of 1 |              `buffers` of them: read i+1 | step i | write i-1
    disk          masters and states of all

`offload_optimizer.buffer_count` buffers of `sub_group_size` elements each are what the user grants. A sub-group takes one
for each tensor of the optimizer (Adam: masters and two moments), and as many sub-groups are in memory at once as overlap
asks for; so sub-groups are made as small as that needs, and smaller still where more of them overlap better.

Pure arithmetic. Called by `engine.tiers`; the walk in memory (`zero.master`) cuts at the same grains.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.errors import ConfigError

__all__ = ["PAGE_NBYTES", "SubGroups", "aligned", "check_buffers", "plan_sub_groups", "whole_grains"]

PAGE_NBYTES = 4096
"""What a disk moves at least, and what direct transfers begin at."""

_MOST_NUMEL = 1 << 22  # 48 MiB of Adam's tensors: many times what a disk needs for its full speed
_LEAST_NUMEL = 1 << 18
_PARTS = 16  # of a shard: enough that the first read and the last write, which nothing hides, are a small share
_GRAINS = (PAGE_NBYTES, 64, 16)  # elements: ranges of every dtype begin at pages; else at cache lines, or vectors


@dataclass(frozen=True)
class SubGroups:
    """What was planned."""

    numel: int
    """Most elements of one sub-group."""

    buffers: int
    """Sub-groups in memory at once."""


def plan_sub_groups(
    shard_numel: int, tensors: int, *, sub_group_size: int, buffer_count: int, reads_ahead: bool, writes_behind: bool
) -> SubGroups:
    """Choose the size of sub-groups and the number of them in memory.

    At most three quarters of all sub-groups are kept in memory (docs/adr/0011 says why so many), unless so few are not
    enough to overlap: a host that has room for all of them does not need a disk.

    Args:
        shard_numel: elements of this rank's shards, > 0.
        tensors: that rest for each element, masters among them.
        sub_group_size: most elements of a sub-group, as configured.
        buffer_count: buffers of `sub_group_size` elements that may be made.
        reads_ahead: the next sub-group is read while one is stepped.
        writes_behind: the last one is written meanwhile.

    Raises:
        ConfigError: fewer buffers than tensors.
    """
    check_buffers(buffer_count, tensors)
    at_once = 1 + reads_ahead + writes_behind
    granted_numel = buffer_count * min(sub_group_size, shard_numel)
    suits_overlap = min(max(-(-shard_numel // _PARTS), _LEAST_NUMEL), _MOST_NUMEL)
    numel = whole_grains(min(granted_numel // (tensors * at_once), sub_group_size, suits_overlap))
    groups = -(-shard_numel // numel)
    buffers = max(at_once, min(granted_numel // (tensors * numel), groups * 3 // 4))
    return SubGroups(numel, min(buffers, groups))


def check_buffers(buffer_count: int, tensors: int) -> None:
    """Raise ConfigError where there are fewer buffers than tensors of one parameter."""
    if buffer_count < tensors:
        raise ConfigError(
            f"zero_optimization.offload_optimizer.buffer_count = {buffer_count}, but this optimizer keeps {tensors} tensors "
            f"per parameter (masters and {tensors - 1} of state), and a sub-group needs a buffer for each. Set it to at "
            f"least {tensors}."
        )


def aligned(number: int, unit: int = PAGE_NBYTES) -> int:
    """`number` rounded up to a multiple of `unit`."""
    return -(-number // unit) * unit


def whole_grains(numel: int) -> int:
    """`numel` rounded down to whole grains where it has some, and at least 1.

    Ranges that begin at grains are stepped alike however long they are: torch's kernels round what does not fill a vector,
    the last elements of a range, in another way than the rest.
    """
    grain = next((grain for grain in _GRAINS if numel >= grain), 1)
    return max(1, numel // grain * grain)
