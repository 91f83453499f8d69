"""Every collective of `deepspeed.comm` is followed: while one waits, it can be seen, and it would raise a verdict."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepspeed import comm
from deepspeed.comm.watch import WATCH
from deepspeed.comm.world import current_world
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.alone  # limits of seconds

ENV = {"DEEPSPEED_WATCH_SECONDS": "20"}


def _four() -> torch.Tensor:
    return torch.ones(4)


def _pair() -> list[torch.Tensor]:
    return [torch.ones(4), torch.ones(4)]


CALLS: dict[str, Callable[[int], Any]] = {
    "all_gather": lambda rank: comm.all_gather(_pair(), _four()),
    "all_gather_coalesced": lambda rank: comm.all_gather_coalesced([torch.ones(8)], [_four()]),
    "all_gather_into_tensor": lambda rank: comm.all_gather_into_tensor(torch.ones(8), _four()),
    "all_gather_object": lambda rank: comm.all_gather_object([None, None], rank),
    "all_reduce": lambda rank: comm.all_reduce(_four()),
    "all_reduce_coalesced": lambda rank: comm.all_reduce_coalesced(_pair()),
    "all_to_all": lambda rank: comm.all_to_all(_pair(), _pair()),
    "all_to_all_single": lambda rank: comm.all_to_all_single(_four(), _four()),
    "allgather_fn": lambda rank: comm.allgather_fn(torch.ones(8), _four()),
    "barrier": lambda rank: comm.barrier(),
    "batch_isend_irecv": lambda rank: [
        work.wait()
        for work in comm.batch_isend_irecv(
            [comm.P2POp(comm.isend, _four(), 1 - rank), comm.P2POp(comm.irecv, _four(), 1 - rank)]
        )
    ],
    "broadcast": lambda rank: comm.broadcast(_four(), 1),
    "broadcast_object_list": lambda rank: comm.broadcast_object_list([rank], 1),
    "gather": lambda rank: comm.gather(_four(), _pair() if rank == 0 else None, 0),
    "inference_all_reduce": lambda rank: comm.inference_all_reduce(_four()),
    "initialize_mesh_device": lambda rank: comm.initialize_mesh_device((2, 2), ("one", "two")),
    "irecv": lambda rank: comm.irecv(_four(), 1).wait() if rank == 0 else comm.send(_four(), 0),
    "isend": lambda rank: comm.isend(torch.ones(1 << 22), 1).wait() if rank == 0 else comm.recv(torch.ones(1 << 22), 0),
    "kept_group": lambda rank: comm.kept_group([0, 1], "calls"),
    "monitored_barrier": lambda rank: comm.monitored_barrier(),
    "new_group": lambda rank: comm.new_group([0, 1]),
    "recv": lambda rank: comm.recv(_four(), 1) if rank == 0 else comm.send(_four(), 0),
    "reduce": lambda rank: comm.reduce(_four(), 0),
    "reduce_scatter": lambda rank: comm.reduce_scatter(_four(), _pair()),
    "reduce_scatter_fn": lambda rank: comm.reduce_scatter_fn(torch.ones(2), _four()),
    "reduce_scatter_tensor": lambda rank: comm.reduce_scatter_tensor(torch.ones(2), _four()),
    "scatter": lambda rank: comm.scatter(_four(), _pair() if rank == 1 else None, 1),
    "send": lambda rank: comm.send(torch.ones(1 << 22), 1) if rank == 0 else comm.recv(torch.ones(1 << 22), 0),
}

MEET_NOBODY = {
    "configure", "destroy_process_group", "enable_symm_mem_for_group", "get_all_ranks_from_group",
    "get_comm_operation_count", "get_global_rank", "get_local_rank", "get_local_rank_from_launcher",
    "get_logged_comm_ops", "get_rank", "get_world_group", "get_world_rank_from_launcher", "get_world_size",
    "get_world_size_from_launcher", "has_all_gather_into_tensor", "has_all_reduce_coalesced", "has_coalescing_manager",
    "has_comm_data", "has_reduce_scatter_tensor", "in_aml", "in_aws_sm", "in_dlts", "is_available", "is_initialized",
    "log_summary", "mpi_discovery", "patch_aml_env_for_torch_nccl_backend", "patch_aws_sm_env_for_torch_nccl_backend",
    "reset_log",
}  # fmt: skip
"""Functions that move nothing between ranks, or (`log_summary`) do so through those above."""

JOINS = {"init_distributed"}
"""Watched by `comm.rendezvous`: there is no group yet."""


def test_the_list_of_calls_is_whole() -> None:
    functions = {name for name in comm.__all__ if inspect.isfunction(getattr(comm, name))}
    assert functions == {*CALLS, *MEET_NOBODY, *JOINS}


def _waits(rank: int, _world_size: int, names: list[str]) -> list[str]:
    """Rank 0 makes each call at once, the others when it has been seen to wait; names the calls that were not followed."""
    current_world()
    store = WATCH._store()
    assert store is not None
    for _ in range(2):
        comm.barrier()
    lacking: list[str] = []
    checks = [0]
    check = WATCH.check

    def counted() -> None:
        checks[0] += 1
        check()

    WATCH.check = counted  # type: ignore[method-assign]
    for name in names:
        call = CALLS[name]
        if rank != 0:
            store.wait([f"seen {name}"])
            call(rank)
            continue
        thread = threading.Thread(target=_announce, args=(store, name, checks, lacking))
        thread.start()
        call(rank)
        thread.join()
    WATCH.check = check  # type: ignore[method-assign]
    return lacking


def _announce(store: Any, name: str, checks: list[int], lacking: list[str]) -> None:
    """Let the others go on once the call waits and looks for a verdict again and again; note it when it does not in 3 s."""
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        before = checks[0]
        time.sleep(0.3)
        if WATCH.ledger.report().waits and checks[0] > before:
            break
    else:
        lacking.append(name)
    store.set(f"seen {name}", "")


def test_every_call_is_seen_to_wait_and_looks_for_a_verdict() -> None:
    assert run_ranks(_waits, 2, [name for name in CALLS if name != "initialize_mesh_device"], env=ENV)[0] == []


def test_the_making_of_a_mesh_is_seen_to_wait() -> None:
    # Four ranks: where a dimension has one rank or all of them, torch makes no group, and nobody waits.
    assert run_ranks(_waits, 4, ["initialize_mesh_device"], env=ENV)[0] == []
