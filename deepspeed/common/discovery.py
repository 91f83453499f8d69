"""Where this process stands among the ranks, read from the variables that launchers and schedulers set.

Lives here: pure functions of a mapping of variables, and the table of schedulers. Does not live here: reading the real
environment and creating the process group (`comm.world`), which is a caller as the launcher is.

    RANK, WORLD_SIZE set ----------------------------> they decide (torchrun, the deepspeed launcher, your own script)
    else a scheduler's rank and size ----------------> Open MPI, MVAPICH, MPICH/Intel MPI (PMI), PMIx, Slurm; no mpi4py
    else some of RANK, WORLD_SIZE, more than 1 rank --> error that names the missing ones
    else ---------------------------------------------> one process, alone

[Note: mpirun inside Slurm] mpirun starts its helpers through srun, so SLURM_PROCID then counts helpers, not ranks. Slurm
therefore comes last in the table. A batch script or an interactive allocation is no rank either: only `srun` sets
SLURM_STEP_NUM_TASKS *and* gives each task its SLURM_PROCID, so that variable, not SLURM_NTASKS, is the size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed.errors import CommError

__all__ = [
    "DEFAULT_PORT",
    "Placement",
    "discover",
    "first_slurm_host",
    "in_aml",
    "in_aws_sm",
    "in_dlts",
    "master_address",
    "parse_port",
    "slurm_tasks_per_node",
]

DEFAULT_PORT = 29500
LOOPBACK = "127.0.0.1"

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Placement:
    """One rank's place, as far as the variables tell it."""

    rank: int
    world_size: int
    local_rank: int | None
    """Position among the ranks of this host; None when nothing says it."""
    local_world_size: int | None
    master_addr: str | None
    """Host of rank 0; None when nothing says it."""
    master_port: int
    source: str
    """What set the variables, for messages."""

    def as_environ(self) -> dict[str, str]:
        """Return the standard variables that say the same; unknown ones are left out."""
        known = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        return {name: str(value) for name, value in known.items() if value is not None}


class _Scheduler(NamedTuple):
    """The variables in which one scheduler tells ranks their place; the first one set counts."""

    name: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]


_SCHEDULERS = (
    _Scheduler(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Scheduler(
        "MVAPICH",
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Scheduler(
        "MPICH or Intel MPI",
        ("PMI_RANK", "PMIX_RANK"),
        ("PMI_SIZE", "WORLD_SIZE"),
        ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", "LOCAL_SIZE"),
    ),
    _Scheduler("Slurm", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS",), ("SLURM_LOCALID",), ()),
)


def discover(environ: Environ, *, use_schedulers: bool = True, default_port: int | str = DEFAULT_PORT) -> Placement:
    """Return this process's place (see the picture above).

    Args:
        environ: the variables.
        use_schedulers: False lets only RANK and WORLD_SIZE count.
        default_port: port of rank 0's store when MASTER_PORT does not say it.

    Raises:
        CommError: variables are missing, are not numbers, or contradict each other.
    """
    port = parse_port("MASTER_PORT", environ["MASTER_PORT"]) if environ.get("MASTER_PORT") else None
    if port is None:
        port = parse_port("distributed_port", default_port)
    if environ.get("RANK") and environ.get("WORLD_SIZE"):
        return _standard(environ, port)
    scheduled = _scheduled(environ, port)
    if scheduled is not None and use_schedulers:
        return scheduled
    if scheduled is not None and scheduled.world_size > 1:
        raise CommError(
            f"{scheduled.source} says this is rank {scheduled.rank} of {scheduled.world_size}, but auto_mpi_discovery=False "
            "and RANK and WORLD_SIZE are not set. Set them, or leave auto_mpi_discovery on."
        )
    return _alone_or_incomplete(environ, port)


def _standard(environ: Environ, port: int) -> Placement:
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    _check_rank(rank, world_size, "RANK", "WORLD_SIZE")
    local_rank = _first_number(environ, ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"))
    local_world_size = _first_number(environ, ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"))
    address = master_address(environ, world_size, local_world_size)
    return Placement(rank, world_size, local_rank, local_world_size, address, port, "the environment (RANK, WORLD_SIZE)")


def _scheduled(environ: Environ, port: int) -> Placement | None:
    for scheduler in _SCHEDULERS:
        rank = _first_number(environ, scheduler.rank)
        world_size = _first_number(environ, scheduler.world_size)
        if rank is None or world_size is None:
            continue
        _check_rank(rank, world_size, scheduler.rank[0], scheduler.world_size[0])
        local_rank = _first_number(environ, scheduler.local_rank)
        local_world_size = _first_number(environ, scheduler.local_world_size)
        is_slurm_step = _first_number(environ, ("SLURM_STEP_NUM_TASKS",)) == world_size
        if is_slurm_step and local_rank is None:  # srun with a PMI plug-in: both count the same ranks
            local_rank = _first_number(environ, ("SLURM_LOCALID",))
        if is_slurm_step and local_world_size is None:
            counts = slurm_tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
            node = _first_number(environ, ("SLURM_NODEID",)) or 0
            local_world_size = counts[node] if node < len(counts) else None
        address = master_address(environ, world_size, local_world_size, is_slurm_step=is_slurm_step)
        return Placement(rank, world_size, local_rank, local_world_size, address, port, scheduler.name)
    return None


def _alone_or_incomplete(environ: Environ, port: int) -> Placement:
    given = [name for name in ("RANK", "WORLD_SIZE") if environ.get(name)]
    missing = [name for name in ("RANK", "WORLD_SIZE") if not environ.get(name)]
    if given and any(_number(environ, name) != only for name, only in (("RANK", 0), ("WORLD_SIZE", 1)) if name in given):
        said = ", ".join(f"{name}={environ[name]}" for name in given)
        raise CommError(
            f"{said} is set, but {' and '.join(missing)} is missing, so this process cannot find the others. "
            "Start the script with the deepspeed launcher, torchrun, mpirun or srun, or set "
            "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT yourself."
        )
    return Placement(0, 1, _first_number(environ, ("LOCAL_RANK",)) or 0, 1, LOOPBACK, port, "no launcher: one process")


def master_address(
    environ: Environ, world_size: int, local_world_size: int | None, *, is_slurm_step: bool = False
) -> str | None:
    """Return the host of rank 0 as far as the variables tell it, else None.

    MASTER_ADDR first; then loopback when every rank is on this host; then what AzureML (AZ_BATCH_MASTER_NODE,
    AZ_BATCHAI_MPI_MASTER_NODE), SageMaker (SM_HOSTS) or Slurm (the step's first host) say.
    """
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    if local_world_size == world_size:
        return LOOPBACK
    azure = environ.get("AZ_BATCH_MASTER_NODE") or environ.get("AZ_BATCHAI_MPI_MASTER_NODE")
    if azure:
        return azure.partition(":")[0]
    if environ.get("SM_HOSTS"):
        return str(json.loads(environ["SM_HOSTS"])[0])
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    return first_slurm_host(nodes) if is_slurm_step and nodes else None


def first_slurm_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: `"a[03-05,9],b"` gives `"a03"`, `"r[0-1]n[2-3]"` gives `"r0n2"`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None  # the pattern matches the empty text
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def slurm_tasks_per_node(text: str) -> list[int]:
    """Return the tasks on each node of a step: `"2(x3),1"` gives `[2, 2, 2, 1]`, the empty text nothing."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, nodes in runs for _ in range(int(nodes or 1))]


def parse_port(name: str, port: int | str) -> int:
    """Return a port given as a number or as text; `name` is what the error calls it."""
    try:
        number = int(port)
    except ValueError:
        number = 0
    if not 1 <= number <= 65535:
        raise CommError(f"{name}={port!r} is not a port; it must be a whole number from 1 to 65535, for example 29500.")
    return number


def _number(environ: Environ, name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise CommError(f"{name}={environ[name]!r} is not a whole number; correct it or unset it.") from None


def _first_number(environ: Environ, names: tuple[str, ...]) -> int | None:
    return next((_number(environ, name) for name in names if environ.get(name)), None)


def _check_rank(rank: int, world_size: int, rank_name: str, size_name: str) -> None:
    if not 0 <= rank < world_size:
        raise CommError(
            f"{rank_name}={rank} with {size_name}={world_size}: ranks count from 0 to the size less one. "
            "Two launchers may have set one variable each; unset one of the two."
        )


def in_aml(environ: Environ) -> bool:
    """True inside an Azure Machine Learning job."""
    return "AZUREML_EXPERIMENT_ID" in environ


def in_aws_sm(environ: Environ) -> bool:
    """True inside an Amazon SageMaker job."""
    return "SM_TRAINING_ENV" in environ


def in_dlts(environ: Environ) -> bool:
    """True inside a job of Microsoft's DLTS."""
    return "DLTS_JOB_ID" in environ
