"""The launcher of one host of an elastic job: ranks that start anew whenever hosts come or go, or ranks fail.

```
   store on the first host --- rendezvous: who is there? ---> DSElasticAgent: when to start, stop, start anew, end
                                                                 |
                                              HostAgent: the launcher's ranks in place of torch's workers
```

The exit status is that of the first rank that failed when no attempt is left, the same on all hosts; 0 when all ranks of a
round ended with 0; 255 when the first host is lost, or this one is cut off from it.

[Note: threads] torch's rendezvous and `elasticity.membership` have threads while ranks are forked. What the child does
before `exec` are system calls alone (`processes.start_process`), so a lock that a thread holds does not matter.

Does not live here: when to do what (`deepspeed.elasticity`), one rank (`ranks`), starting hosts (`elastic_front`). Loads
torch; `launch` calls it.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any, cast

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from deepspeed.common.addresses import found_addresses, listening_socket
from deepspeed.common.logging import get_logger
from deepspeed.elasticity.elastic_agent import DSElasticAgent, JobOverError, place_of
from deepspeed.elasticity.membership import Ended
from deepspeed.errors import LaunchError
from deepspeed.launcher.elastic_limits import limits_of
from deepspeed.launcher.link.hangup import HangUpWatch
from deepspeed.launcher.pidfile import pid_file
from deepspeed.launcher.placement import RankPlace
from deepspeed.launcher.processes import SignalInbox, adopting_orphans, signal_name
from deepspeed.launcher.ranks import Rank, commands_of, end_the_rest, outputs_of, reap, report, start_rank, stop
from deepspeed.launcher.seat import TOKEN_NAME, Seat

__all__ = ["HostAgent", "run"]

logger = get_logger("deepspeed.launcher.launch")  # the name under which users know these messages

_CONNECT_SECONDS = 60
_GATHER_SECONDS = 20.0
"""For all hosts to come at the start of the job; later it is `_LAST_CALL_SECONDS`."""
_LAST_CALL_SECONDS = 3
_KEEP_ALIVE = {"keep_alive_interval": 1, "keep_alive_max_attempt": 4}
_JOIN_SECONDS = 600
_STORE_SECONDS = 10
_PAUSE_SECONDS = 0.25
_PRESENT, _BEGUN, _ROUNDS, _RESTARTS = (f"deepspeed/{name}" for name in ("present", "begun", "rounds", "restarts"))
_OWN_STORE_NAME = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_OWN_NAMES = (TOKEN_NAME, "TORCH_CPP_LOG_LEVEL", _OWN_STORE_NAME)
"""Variables of this process that are not for ranks."""


class _AskedToEndError(Exception):
    """A signal came, or the front end is gone."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def run(args: argparse.Namespace, seat: Seat) -> int:
    """Run this host's part of the job, and end this process with its exit status.

    Args:
        args: what `parse_launch_args` returned.
        seat: this host's place among all hosts that may take part.

    Raises:
        LaunchError: the job cannot be met, or ranks cannot be started as asked.
    """
    os.environ[_OWN_STORE_NAME] = "1"  # else ranks of a new round would meet left-overs of the old one
    signums = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with SignalInbox(*signums) as inbox, adopting_orphans(), pid_file(args.save_pid):
        status = _run(args, seat, inbox)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a thread may be held for ever by a call to a store that is cut off


def _run(args: argparse.Namespace, seat: Seat, inbox: SignalInbox) -> int:
    agent = None
    try:
        agent = HostAgent(args, seat, inbox)
        return agent.end(agent.run())
    except _AskedToEndError as asked:
        logger.info("received %s: ending this host's ranks", signal_name(asked.signum))
        return 128 + asked.signum
    except JobOverError as over:
        logger.log(*_level(over))
        return over.status
    finally:
        if agent is not None:
            agent.end_ranks()


def _level(over: JobOverError) -> tuple[int, str]:
    """Of a host that came too late for a job that went well, nobody needs to do anything."""
    return (20 if over.status == 0 else 40), str(over)


class HostAgent(DSElasticAgent):
    """The agent of one host under our launcher."""

    def __init__(self, args: argparse.Namespace, seat: Seat, inbox: SignalInbox) -> None:
        """Meet the other hosts.

        Raises:
            LaunchError: the first host does not listen, or its port is in use.
        """
        fewest, most = limits_of(args, len(seat.world_info))
        self._args, self._inbox = args, inbox
        self._name, self._slots = seat.host, seat.slots
        self._ranks: list[Rank] = []
        self._failed: Rank | None = None
        self._asked: int | None = None
        self._restarts = 0
        self._hang_up = HangUpWatch() if seat.has_front_end else None
        self._store: Any = self._in_thread(lambda: _open_store(args))
        self._in_thread(lambda: _gather(self._store, most))
        spec = WorkerSpec(
            role="ranks",
            local_world_size=len(self._slots),
            rdzv_handler=self._in_thread(lambda: _handler(self._store, args, fewest, most)),
            entrypoint=args.training_script,
            max_restarts=args.max_restarts,
            monitor_interval=_PAUSE_SECONDS,
        )
        job_store = self._store
        super().__init__(spec, {})
        self._own_store = job_store
        self._keeps_store = args.node_rank == 0
        self._host_name = f"{self._name}:{os.getpid()}"

    # -- what the loop of DSElasticAgent asks -------------------------------------------------------------------------

    def _pause(self) -> None:
        """Wait for a child to end.

        Raises:
            _AskedToEndError: a request to end came.
        """
        self._listen(_PAUSE_SECONDS)
        if self._asked is not None:
            raise _AskedToEndError(self._asked)

    def _listen(self, seconds: float) -> None:
        received = set(self._inbox.wait(seconds)) - {int(signal.SIGCHLD)}
        if received:
            self._asked = received.pop()
        elif self._hang_up is not None and select.select([self._hang_up], [], [], 0)[0]:
            self._asked = int(signal.SIGTERM)

    def _in_thread(self, call: Any) -> Any:
        """What `call` gives, while requests to end are heard; it may be left behind in its thread."""
        thread = _Call(call)
        thread.start()
        while thread.is_alive():
            self._pause()
        return thread.result()

    def _job_store(self) -> Any:
        return self._own_store

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        began = time.monotonic()
        self._in_thread(lambda: self._meet(worker_group))
        hosts, ranks = worker_group.group_world_size, worker_group.workers[0].world_size
        seconds = time.monotonic() - began
        logger.info("%d hosts, %d ranks in all: starting them (found together in %.1f s)", hosts, ranks, seconds)

    def _meet(self, worker_group: WorkerGroup) -> None:
        """Take part in a round, and agree on its number: hosts count their own failures, and may have joined late."""
        super()._rendezvous(worker_group)
        store = cast("TCPStore", worker_group.store)
        if place_of(worker_group)[0] == 0:
            store.set(_RESTARTS, str(self._own_store.add(_ROUNDS, 1) - 1))
        self._restarts = int(store.get(_RESTARTS))

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        place = {"master_addr": worker_group.master_addr, "master_port": worker_group.master_port}
        args = argparse.Namespace(**{**vars(self._args), **place})
        hosts = place_of(worker_group)
        places = [
            RankPlace(worker.global_rank, worker.local_rank, worker.world_size, len(self._slots), hosts[0], hosts[1])
            for worker in worker_group.workers
        ]
        kept = {name: value for name, value in os.environ.items() if name not in _OWN_NAMES}
        commands = commands_of(args, places, self._slots, kept)
        outputs = outputs_of(args.enable_each_rank_log, [place.rank for place in places])
        self._ranks, self._failed = [], None
        for command, output in zip(commands, outputs, strict=True):
            command.environment.update(self._extra_environment(worker_group))
            self._ranks.append(start_rank(command, output))
        for rank in self._ranks:
            rank.output.started()  # after the last fork: these may be threads
        return {rank.place.local_rank: rank.process.pid for rank in self._ranks}

    def _extra_environment(self, worker_group: WorkerGroup) -> dict[str, str]:
        """What torch's own agent tells its workers."""
        return {
            "LOCAL_WORLD_SIZE": str(len(self._slots)),
            "GROUP_RANK": str(worker_group.group_rank),
            "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
            "TORCHELASTIC_RUN_ID": worker_group.spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_RESTART_COUNT": str(self._restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self._attempts.limit),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        reap(self._ranks)
        ended = [rank for rank in self._ranks if rank.exit_status is not None]
        failed = [rank for rank in ended if rank.exit_status]
        if failed:  # of several, the one a signal ended
            self._failed = min(failed, key=lambda rank: rank.process.returncode > 0)
            return RunResult(WorkerState.FAILED)
        is_done = len(ended) == len(self._ranks)
        values = {worker.global_rank: None for worker in worker_group.workers}
        return RunResult(WorkerState.SUCCEEDED if is_done else WorkerState.HEALTHY, return_values=values)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.end_ranks()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.end_ranks()

    # -- ends ---------------------------------------------------------------------------------------------------------

    def end_ranks(self) -> None:
        """Ask the ranks to end, by what we were asked with; nothing of them is there afterwards."""

        def wait(seconds: float) -> bool:
            before = self._asked
            self._listen(min(seconds, _PAUSE_SECONDS))
            reap(self._ranks)
            return before is not None and self._asked != before

        if self._ranks:
            stop(self._ranks, self._asked or signal.SIGTERM, wait)
            end_the_rest(self._ranks)
            self._ranks = []

    def _cause(self) -> Ended:
        failed = self._failed
        assert failed is not None  # asked for after a failure alone
        assert failed.exit_status is not None  # it has failed, so it has ended
        return Ended(failed.exit_status, f"rank {failed.place.rank} on host {self._name} failed with {failed.how_it_ended}")

    def end(self, result: RunResult) -> int:
        """The exit status of a job whose end this host has decided; tells the user about a failure."""
        if not result.is_failed() or self._failed is None:
            return 0
        report(self._failed, self._name)
        return self._cause().status


class _Call(threading.Thread):
    """One call in a thread of its own."""

    def __init__(self, call: Any) -> None:
        super().__init__(name="elastic-call", daemon=True)
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:  # raised again by `result`, in the thread that waits
            self._error = error

    def result(self) -> Any:
        """What the call gave; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._value


def _open_store(args: argparse.Namespace) -> TCPStore:
    """Listen on the first host; connect to it from all."""
    address, port, is_first = args.master_addr, args.master_port, args.node_rank == 0
    try:
        listening = listening_socket(address, port).detach() if is_first else None
        store = TCPStore(
            address,
            port,
            None,
            is_first,
            timeout=timedelta(seconds=_CONNECT_SECONDS),
            wait_for_workers=False,
            master_listen_fd=listening,
        )
    except (OSError, DistError) as error:
        what = "listens on no such port" if is_first else "does not answer"
        raise LaunchError(
            f"the first host of the elastic job, {address}:{port}, {what}: {error}. See that the launcher runs there "
            "(--node_rank 0), that --master_addr is its address, and that no firewall or other program has the port."
        ) from error
    store.set_timeout(timedelta(seconds=_STORE_SECONDS))
    return store


def _gather(store: TCPStore, most: int) -> None:
    """At the start of the job, wait a while for all its hosts: a round with some of them would soon start anew."""
    store.add(_PRESENT, 1)
    deadline = time.monotonic() + _GATHER_SECONDS
    while not store.check([_BEGUN]) and store.add(_PRESENT, 0) < most and time.monotonic() < deadline:
        time.sleep(0.1)
    store.set(_BEGUN, "")


def _handler(store: TCPStore, args: argparse.Namespace, fewest: int, most: int) -> DynamicRendezvousHandler:
    run_id = os.environ.get("ELASTIC_RUN_ID") or "deepspeed"
    timeout = RendezvousTimeout(
        join=timedelta(seconds=_JOIN_SECONDS),
        last_call=timedelta(seconds=_LAST_CALL_SECONDS),
        close=timedelta(seconds=5),
    )
    handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
        run_id,
        store,
        C10dRendezvousBackend(store, run_id),
        fewest,
        most,
        _own_address(args.master_addr, args.master_port),
        timeout,
        **_KEEP_ALIVE,
    )
    return handler


def _own_address(address: str, port: int) -> str:
    """This host's address as the first host sees it."""
    found = found_addresses(address, port, socket.SOCK_DGRAM)[0]
    with socket.socket(found.family, found.kind) as probe:
        probe.connect(found.place)  # sends nothing
        return str(probe.getsockname()[0])
