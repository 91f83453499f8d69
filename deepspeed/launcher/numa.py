"""Which cores each rank of a host gets, and the `numactl` words that bind it to them.

Pure arithmetic over lists of cores; `machine_cores` and `machine_nodes` read what this machine has. `launch` calls them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepspeed.errors import LaunchError

__all__ = [
    "CoreListError",
    "check_affinity_conflict",
    "cores_of_rank",
    "get_numactl_cmd",
    "machine_cores",
    "machine_nodes",
    "numactl_argv",
    "parse_range_list",
]


class CoreListError(LaunchError, ValueError):
    """A list of cores is malformed, or too short for the ranks."""


def parse_range_list(text: str) -> list[int]:
    """Read `1,3-5,7` as [1, 3, 4, 5, 7].

    Raises:
        CoreListError: for a part that is no number or rising range, or a core named twice.
    """
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)) or (dash and int(last) < int(first)):
            raise CoreListError(f"core list {text!r}: {part!r} is no core and no rising range; write for example 1,3-5,7.")
        cores.extend(range(int(first), int(last or first) + 1))
    repeated = sorted({core for core in cores if cores.count(core) > 1})
    if repeated:
        raise CoreListError(f"core list {text!r} names cores {repeated} more than once: name each core once.")
    return sorted(cores)


def cores_of_rank(cores: Sequence[int], local_size: int, local_rank: int) -> list[int]:
    """The cores of `local_rank`: every rank gets len(cores) // local_size, in order; what is left over stays free.

    Raises:
        CoreListError: when there are fewer cores than ranks.
    """
    count = len(cores) // local_size
    if count < 1:
        raise CoreListError(
            f"{len(cores)} cores for {local_size} ranks: binding needs at least one core per rank. "
            "Give a longer --bind_core_list, start fewer ranks, or leave --bind_cores_to_rank out."
        )
    return list(cores[count * local_rank : count * (local_rank + 1)])


def numactl_argv(cores: Sequence[int], nodes: Mapping[int, Sequence[int]]) -> list[str]:
    """The words that bind a command to `cores`, and on a machine of several memory nodes to the nodes of those cores.

    Args:
        cores: cores of one rank, at least one.
        nodes: cores of each memory node of the machine.
    """
    near = sorted(node for node, node_cores in nodes.items() if set(node_cores) & set(cores))
    memory = ["-m", _ranges(near)] if len(nodes) > 1 and near else []
    return ["numactl", *memory, "-C", _ranges(cores)]


def _ranges(numbers: Sequence[int]) -> str:
    """Write [1, 3, 4, 5, 7] as `1,3-5,7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def check_affinity_conflict(environ: Mapping[str, str]) -> None:
    """Refuse to bind cores under a variable that binds them as well.

    Raises:
        CoreListError: when KMP_AFFINITY is set.
    """
    if "KMP_AFFINITY" in environ:
        raise CoreListError(
            "--bind_cores_to_rank with KMP_AFFINITY set: both bind threads to cores. "
            "Run `unset KMP_AFFINITY` first, or leave --bind_cores_to_rank out."
        )


def machine_cores(sys_cpu: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """The physical cores this process may use: the first thread of each, in order.

    Args:
        sys_cpu: where the kernel describes cores.
    """
    allowed = sorted(os.sched_getaffinity(0))
    cores: dict[tuple[int, ...], int] = {}
    for thread in allowed:
        siblings = sys_cpu / f"cpu{thread}" / "topology" / "thread_siblings_list"
        core = tuple(parse_range_list(siblings.read_text().strip())) if siblings.is_file() else (thread,)
        cores.setdefault(core, thread)
    return sorted(cores.values())


def machine_nodes(sys_node: Path = Path("/sys/devices/system/node")) -> dict[int, list[int]]:
    """Threads of each memory node of this machine; empty where the kernel does not say.

    Args:
        sys_node: where the kernel describes memory nodes.
    """
    nodes: dict[int, list[int]] = {}
    for folder in sys_node.glob("node[0-9]*"):
        text = (folder / "cpulist").read_text().strip()
        nodes[int(folder.name.removeprefix("node"))] = parse_range_list(text) if text else []
    return nodes


def get_numactl_cmd(bind_core_list: str | None, num_local_procs: int, local_rank: int) -> tuple[int, list[str]]:
    """Cores per rank and the `numactl` words for one rank of this machine.

    Args:
        bind_core_list: such as `1,3-5,7`; None means all physical cores this process may use.
        num_local_procs: ranks on this machine.
        local_rank: the rank among them.

    Raises:
        CoreListError: for a bad or too short list, or when KMP_AFFINITY is set.
    """
    check_affinity_conflict(os.environ)
    cores = machine_cores() if bind_core_list is None else parse_range_list(bind_core_list)
    mine = cores_of_rank(cores, num_local_procs, local_rank)
    return len(mine), numactl_argv(mine, machine_nodes())
