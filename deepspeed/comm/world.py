"""The process group: how this process joins the others, and where it stands among them.

Lives here: `init_distributed`, the current world behind get and set, and the only reading of RANK, WORLD_SIZE,
DEEPSPEED_TIMEOUT, DEEPSPEED_WATCH_SECONDS and the placement variables. Does not live here: what the variables mean
(`discovery`), how ranks meet (`rendezvous`) and the collectives. `deepspeed.initialize` calls it; a process group that
somebody else started is adopted.

[Note: one process] A world of one rank meets nobody, so it gets a store in memory: no port is opened, and any number of
such processes run beside each other.
"""

from __future__ import annotations

import importlib
import itertools
import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.blocking import dismiss
from deepspeed.comm.exit import settle_threads_at_exit
from deepspeed.comm.failures import NotInitializedError
from deepspeed.comm.recorder import RECORDER, configure
from deepspeed.comm.rendezvous import Arrival, Notices, join, meet
from deepspeed.comm.watch import WATCH
from deepspeed.common import discovery
from deepspeed.common.discovery import DEFAULT_PORT, Placement, discover
from deepspeed.common.logging import get_logger, log_dist, set_rank
from deepspeed.errors import ArgumentError, CommError

__all__ = [
    "World",
    "current_world",
    "default_timeout",
    "destroy_process_group",
    "get_local_rank",
    "get_local_rank_from_launcher",
    "get_world_rank_from_launcher",
    "get_world_size_from_launcher",
    "in_aml",
    "in_aws_sm",
    "in_dlts",
    "init_distributed",
    "is_initialized",
    "mpi_discovery",
    "patch_aml_env_for_torch_nccl_backend",
    "patch_aws_sm_env_for_torch_nccl_backend",
    "reset_world",
    "watch_seconds",
]

logger = get_logger(__name__)

_DEFAULT_TIMEOUT_MINUTES = 30.0
_DEFAULT_WATCH_SECONDS = 3.0


@dataclass(frozen=True)
class World:
    """The process group that this process belongs to."""

    placement: Placement
    timeout: timedelta | None
    """How long a collective may take; None when somebody else started the group and did not say."""


_current: World | None = None
_meetings = itertools.count(1)
"""Numbers the groups that this process starts: the same ranks may meet again at a store that still has the old keys."""


def current_world() -> World:
    """Return the world; a process group that torch has but we have not seen is adopted.

    Raises:
        NotInitializedError: there is no process group.
    """
    if not dist.is_initialized():
        raise NotInitializedError("current_world")
    if _current is None:
        _set_world(World(_adopted_placement(), timeout=None))
    assert _current is not None  # set on the line above at the latest
    return _current


def reset_world() -> None:
    """Forget the world, and the log with its settings, without touching the process group; for tests."""
    _set_world(None)
    RECORDER.restore_defaults()


def _set_world(world: World | None) -> None:
    global _current
    _current = world
    set_rank(None if world is None else world.placement.rank)
    if world is None or dist.get_backend() == "fake":  # torch's group that only pretends has nobody to ask
        WATCH.stop()
    else:
        WATCH.start(world.placement.rank, world.placement.world_size, watch_seconds(world.timeout))


def is_initialized() -> bool:
    """True when this process has a process group, whoever started it."""
    return dist.is_initialized()


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | str = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the process group; every rank must call it, and it blocks until all have.

    Without any variable and argument this process becomes a world of one. A process group that exists already is kept.

    Args:
        dist_backend: `"nccl"`, `"gloo"`, `"mpi"`, `"ccl"`, ...; None takes the accelerator's.
        auto_mpi_discovery: read Open MPI's, MPICH's, Intel MPI's and Slurm's variables when RANK and WORLD_SIZE are unset.
        distributed_port: port of rank 0's store when MASTER_PORT does not say it; text is accepted.
        verbose: log on rank 0 what was joined.
        timeout: the longest a collective may take; None means DEEPSPEED_TIMEOUT minutes, 30 when unset.
        init_method: where ranks meet, as torch spells it (`"tcp://host:port"`, `"file:///path"`); None means MASTER_ADDR
            and MASTER_PORT.
        dist_init_required: False says that the process group exists already; None and True start one when there is none.
        config: a DeepSpeed config (or its dict) whose `comms_logger` block to apply.
        rank: this process's rank; -1 means what the variables say.
        world_size: number of ranks; -1 means what the variables say.

    Raises:
        ArgumentError: `dist_init_required=False` without a process group, or an argument of the wrong kind.
        CommError: variables are missing or contradict each other, the back end is not in this torch, or ranks did not meet.
    """
    configure(deepspeed_config=config)
    settle_threads_at_exit()
    if dist.is_initialized():
        _keep_existing_group(verbose)
        return
    if dist_init_required is False:
        raise ArgumentError(
            "dist_init_required=False, but torch.distributed has no process group. "
            "Start one before the call, or leave dist_init_required out."
        )
    wait = _checked_timeout(timeout)
    placement = _placement(auto_mpi_discovery, distributed_port, rank, world_size)
    backend = dist_backend or get_accelerator().communication_backend_name()
    _require_backend(backend)
    watch_seconds(wait)  # said before ranks meet, if it is wrong
    _start_group(backend, placement, wait, init_method)
    _set_world(World(_with_local_rank(placement), wait))
    if verbose:
        log_dist(
            f"process group: {placement.world_size} rank(s) over {backend}, told by {placement.source}, "
            f"collectives time out after {wait.total_seconds():g} s"
        )


def _keep_existing_group(verbose: bool) -> None:
    known = _current is not None
    placement = current_world().placement
    if verbose and not known:
        log_dist(f"using the process group of {placement.world_size} rank(s) that torch.distributed has already")


def _adopted_placement() -> Placement:
    """Describe a group that somebody else started; its rank and size count, not the variables'."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local = discover({**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size)})
    return _with_local_rank(replace(local, source="torch.distributed"))


def _placement(auto_mpi_discovery: bool, port: int | str, rank: int, world_size: int) -> Placement:
    """Combine explicit arguments with the variables, and tell the standard variables what a scheduler said."""
    given = {name: str(value) for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)) if value >= 0}
    placement = discover({**os.environ, **given}, use_schedulers=auto_mpi_discovery, default_port=port)
    if given:
        return replace(placement, source="the arguments of init_distributed")
    if placement.world_size > 1:
        for name, value in placement.as_environ().items():
            os.environ.setdefault(name, value)
    return placement


def _with_local_rank(placement: Placement) -> Placement:
    """Fill in an unknown local rank the way launchers number them: ranks of a host are consecutive, one per device."""
    if placement.local_rank is not None:
        return placement
    return replace(placement, local_rank=placement.rank % max(1, get_accelerator().device_count()))


def default_timeout() -> timedelta:
    """Return DEEPSPEED_TIMEOUT (minutes, default 30)."""
    text = os.environ.get("DEEPSPEED_TIMEOUT", "")
    try:
        minutes = float(text or _DEFAULT_TIMEOUT_MINUTES)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise CommError(f"DEEPSPEED_TIMEOUT={text!r} must be a number of minutes above 0, for example 30.")
    return timedelta(minutes=minutes)


def watch_seconds(timeout: timedelta | None) -> float:
    """Return after how long a wait makes ranks compare where they stand; 0: never.

    DEEPSPEED_WATCH_SECONDS (default 3), at most half of what a collective may take.
    """
    text = os.environ.get("DEEPSPEED_WATCH_SECONDS", "")
    try:
        seconds = float(text or _DEFAULT_WATCH_SECONDS)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise CommError(
            f"DEEPSPEED_WATCH_SECONDS={text!r} must be a number of seconds, for example 5, or 0 to switch the watch off."
        )
    return seconds if timeout is None else min(seconds, timeout.total_seconds() / 2)


def _checked_timeout(timeout: timedelta | None) -> timedelta:
    if timeout is None:
        return default_timeout()
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise ArgumentError(f"timeout={timeout!r} must be a datetime.timedelta above 0, for example timedelta(minutes=30).")
    return timeout


def _require_backend(backend: str) -> None:
    if backend == "ccl":  # Intel's bindings register the back end when imported
        importlib.import_module("oneccl_bindings_for_pytorch")
    if not dist.is_backend_available(backend):
        known = [name for name in ("nccl", "gloo", "mpi", "ucc", "xccl") if dist.is_backend_available(name)]
        raise CommError(
            f"dist_backend={backend!r} is not in this build of torch, which has {known}. "
            "Choose one of these, or leave dist_backend out to use the accelerator's."
        )


def _start_group(backend: str, placement: Placement, wait: timedelta, init_method: str | None) -> None:
    if placement.world_size > 1 and init_method is None and placement.master_addr is None:
        raise CommError(
            f"{placement.source} says {placement.world_size} ranks, but MASTER_ADDR is missing, so they cannot find rank 0. "
            "Start the script with the deepspeed launcher or torchrun, or set MASTER_ADDR to the host of rank 0 (mpirun -x "
            "MASTER_ADDR=host, mpirun -genv MASTER_ADDR host)."
        )
    try:
        if backend == "mpi":  # MPI itself knows rank and size
            dist.init_process_group(backend, timeout=wait)
        else:
            store = _meeting_store(placement, wait, init_method)
            dist.init_process_group(backend, store=store, rank=placement.rank, world_size=placement.world_size, timeout=wait)
    except (RuntimeError, ValueError) as cause:
        if isinstance(cause, CommError):  # the meeting says more than we could
            raise
        place = init_method or f"{placement.master_addr}:{placement.master_port}"
        raise CommError(
            f"rank {placement.rank} of {placement.world_size} could not join the process group at {place} over {backend} "
            f"(waited up to {wait.total_seconds():g} s): {cause} "
            "Check that every rank started, that rank 0 runs on that host, and that no other job uses the port; "
            "MASTER_ADDR and MASTER_PORT choose another place."
        ) from cause


def _meeting_store(placement: Placement, wait: timedelta, init_method: str | None) -> Store:
    """The store of the group, once all ranks have come to it. Blocks; see `rendezvous`."""
    if placement.world_size == 1 and init_method is None:  # see [Note: one process]
        return HashStore()
    notices = Notices(wait, logger.warning)
    me = Arrival.here(placement.rank, placement.world_size)
    is_speaker = placement.local_rank in (0, None)
    number = next(_meetings)
    label = f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}, meeting {number}"
    url = urlsplit(init_method or "tcp://")
    if url.scheme not in ("tcp", "env"):  # a file, or what the client registered with torch
        store: Store = next(rendezvous(str(init_method), me.rank, me.world_size, timeout=wait))[0]
        store = PrefixStore(label, store)
        meet(store, me, notices, is_speaker=is_speaker)
        return store
    address, port = url.hostname or str(placement.master_addr), url.port or placement.master_port
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's agent serves it
    serves = me.rank == 0 and not is_agents
    is_again = number > 1
    return join(address, port, me, wait, notices, serves=serves, label=label, is_again=is_again, is_speaker=is_speaker)


def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    """Take a group down; None takes all down, and `init_distributed` may start again."""
    if not dist.is_initialized():
        raise NotInitializedError("destroy_process_group")
    if group is None or group is dist.group.WORLD:
        WATCH.stop()  # while there is a store in which to say so
    dist.destroy_process_group(group)
    if not dist.is_initialized():
        _set_world(None)
        dismiss()


def get_local_rank() -> int:
    """Return this rank's position among the ranks of its host.

    Where no launcher says it: the rank modulo the number of devices, as launchers number consecutive ranks.
    """
    if dist.is_initialized():
        local_rank = current_world().placement.local_rank
        assert local_rank is not None  # _with_local_rank fills it in for every world
        return local_rank
    return get_local_rank_from_launcher()


def get_world_rank_from_launcher() -> int:
    """Return the rank that the launcher or scheduler gave this process, 0 without one; needs no process group."""
    return discover(os.environ).rank


def get_world_size_from_launcher() -> int:
    """Return the number of ranks that the launcher or scheduler started, 1 without one; needs no process group."""
    return discover(os.environ).world_size


def get_local_rank_from_launcher() -> int:
    """Return the local rank that the launcher or scheduler gave, 0 without one; needs no process group."""
    return discover(os.environ).local_rank or 0


def mpi_discovery(distributed_port: int | str = DEFAULT_PORT, verbose: bool = True) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from an MPI launcher's or Slurm's variables.

    Raises:
        CommError: no such variables are there.
    """
    without_standard = {name: value for name, value in os.environ.items() if name != "RANK"}
    placement = discover(without_standard, default_port=distributed_port)
    if placement.source.startswith("no launcher"):
        raise CommError(
            "mpi_discovery found no variables of Open MPI (OMPI_COMM_WORLD_*), MPICH or Intel MPI (PMI_*), "
            "MVAPICH (MV2_*) or Slurm (SLURM_*). Start the script with mpirun or srun."
        )
    os.environ.update(placement.as_environ())
    if verbose:
        logger.info("%s: rank %d of %d", placement.source, placement.rank, placement.world_size)


def in_aml() -> bool:
    """True inside an Azure Machine Learning job."""
    return discovery.in_aml(os.environ)


def in_aws_sm() -> bool:
    """True inside an Amazon SageMaker job."""
    return discovery.in_aws_sm(os.environ)


def in_dlts() -> bool:
    """True inside a job of Microsoft's DLTS."""
    return discovery.in_dlts(os.environ)


def patch_aml_env_for_torch_nccl_backend(master_port: int | str = 6105, verbose: bool = True) -> None:
    """As `mpi_discovery` inside an Azure Machine Learning job, and keep NCCL off the container bridge."""
    mpi_discovery(master_port, verbose)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "^docker0,lo")


def patch_aws_sm_env_for_torch_nccl_backend(verbose: bool = True) -> None:
    """As `mpi_discovery` inside an Amazon SageMaker job."""
    mpi_discovery(verbose=verbose)
