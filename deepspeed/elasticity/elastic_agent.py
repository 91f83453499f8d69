r"""torch's elastic agent with another loop: what a host of an elastic job does, from its first round to the end of the job.

```
   torch: rendezvous, numbers of ranks, starting and stopping workers      policy: what to do next
        \                                                                    /
         DSElasticAgent._invoke_run: join --> watch --> join again, or end
                                                 ^
                                             membership: what the other hosts say
```

Does not live here: the launcher's own ranks in place of torch's workers (`launcher.elastic_host`, a subclass).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from deepspeed.common.logging import get_logger
from deepspeed.elasticity.membership import Ended, Membership, Store, View, read_ended
from deepspeed.elasticity.policy import CUT_OFF_SECONDS, LOST_SECONDS, Action, Attempts, MemberState, Seen, decide
from deepspeed.errors import LaunchError

__all__ = ["DSElasticAgent", "JobOverError", "place_of"]

logger = get_logger(__name__)

_LOST_STATUS = 255
_STATES = {WorkerState.HEALTHY: MemberState.RUNNING, WorkerState.SUCCEEDED: MemberState.FINISHED}


class JobOverError(LaunchError):
    """This host has no part in the job any more; `status` is what it exits with."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class DSElasticAgent(LocalElasticAgent):
    """The agent of one host.

    Args:
        spec: the workers and the rendezvous, as torch's agents take them; `max_restarts` are failures of workers in a row.
        env: variables that every worker gets besides those of this process.
        start_method: how workers that are functions are started.
        exit_barrier_timeout: seconds to wait at the end of the job until all other hosts know of it.
        log_dir: folder for the workers' logs; None: they write to our streams.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        env: Mapping[str, str],
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_dir: str | None = None,
    ) -> None:
        logs = DefaultLogsSpecs(log_dir=log_dir)
        super().__init__(spec, logs, start_method, exit_barrier_timeout)
        self._env = dict(env)
        self._attempts = Attempts(spec.max_restarts)
        self._hosts: frozenset[str] = frozenset()
        self._was_failure = False
        self._keeps_store = True  # perhaps: then it stays until the other hosts know how the job ended
        self._host_name = f"{socket.gethostname()}:{os.getpid()}"

    # -- hooks of a subclass ------------------------------------------------------------------------------------------

    def _pause(self) -> None:
        """Let a moment pass, or less when something happened to the workers. May raise to end this host's part."""
        time.sleep(min(self._worker_group.spec.monitor_interval, 1.0))

    def _cause(self) -> Ended:
        """What to tell the other hosts about workers that failed."""
        return Ended(1, f"workers of {self._host_name} failed")

    def _job_store(self) -> Any:
        """The store of the whole job, below that of a round; None before the first round."""
        store = self._worker_group.store
        return store.underlying_store if isinstance(store, PrefixStore) else store

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with _variables(self._env):
            return cast("dict[int, Any]", super()._start_workers(worker_group))

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Take part in one round after the other until the job is over.

        Raises:
            JobOverError: it is over for this host, other than by all workers' success or by its own giving up.
        """
        group = self._worker_group
        while True:
            members = self._join(group)
            members.start()
            try:
                action, result = self._watch(members)
                if action in (Action.RESTART, Action.RETRY):
                    members.tell(MemberState.RESTARTING)
                    self._stop_workers(group)
                    group.state = WorkerState.STOPPED
                    continue
                return self._end(members, action, result)
            finally:
                members.close()

    def _join(self, group: WorkerGroup) -> Membership:
        """Wait for the next round and start the workers."""
        handler = group.spec.rdzv_handler
        try:
            self._initialize_workers(group)
        except RendezvousClosedError:
            raise self._over() from None
        except RendezvousTimeoutError as error:
            needed = "too few hosts came together in time; --min_elastic_nodes says how many are needed."
            raise JobOverError(needed, 1) from error
        except RendezvousConnectionError as error:
            raise _store_lost(str(error)) from error
        return Membership(
            cast("Store", group.store),
            self._job_store(),
            *place_of(group),
            self._host_name,
            handler.num_nodes_waiting,
        )

    def _over(self) -> JobOverError:
        """The error of a host that comes when the job has ended."""
        store = self._job_store()
        ended = (None if store is None else read_ended(store)) or Ended(0, "it is done")
        return JobOverError(f"the job is over: {ended.text}", ended.status)

    def _watch(self, members: Membership) -> tuple[Action, RunResult]:
        """Look after the workers until there is something to do."""
        group = self._worker_group
        began, failed_at, is_known = time.monotonic(), 0.0, False
        own, result = MemberState.RUNNING, RunResult(WorkerState.HEALTHY)
        while True:
            self._pause()
            view, now = members.view(), time.monotonic()
            if view.fault or members.seconds_old() > CUT_OFF_SECONDS:
                raise _store_lost(view.fault or f"it has not answered for {CUT_OFF_SECONDS:g} s")
            if own is MemberState.RUNNING:
                result = self._monitor_workers(group)
                group.state = result.state
                own = _STATES.get(result.state, MemberState.FAILED)
                if own is not MemberState.RUNNING:
                    failed_at = now
                    self._attempts.ran(now - began)
                    members.tell(own)
            if not is_known and len(view.peers) == members.size - 1:
                is_known = True
                self._attempts.joined(self._hosts, view.hosts, by_failure=self._was_failure)
                self._hosts, self._was_failure = view.hosts, False
            action = decide(self._seen(own, members, now - failed_at))
            if action is not Action.GO_ON:
                self._tell_why(action, view)
                self._was_failure = action is Action.RETRY
                return action, result

    def _seen(self, own: MemberState, members: Membership, failed_seconds: float) -> Seen:
        view = members.view()
        unheard = members.size - 1 - len(view.peers)
        return Seen(
            own=own,
            peers=[*(peer.state for peer in view.peers.values()), *[MemberState.RUNNING] * unheard],
            lost=len(view.lost),
            waiting=view.waiting,
            has_ended=view.ended is not None,
            attempts_left=self._attempts.left,
            failed_seconds=failed_seconds,
        )

    def _tell_why(self, action: Action, view: View) -> None:
        """Log what makes the ranks start anew."""
        if action is Action.RETRY:
            self._attempts.failed()
            logger.warning(
                "%s: all ranks start anew, attempt %d of %d", self._cause().text, self._attempts.used, self._attempts.limit
            )
        elif action is Action.RESTART and view.lost:
            lost = ", ".join(name.partition(":")[0] for name in view.lost)
            logger.warning("host %s is lost: all ranks start anew on the others", lost)
        elif action is Action.RESTART:
            is_joining = not any(peer.state is MemberState.RESTARTING for peer in view.peers.values())
            logger.info("all ranks start anew: %s", "a host joins" if is_joining else "those of another host do")

    def _end(self, members: Membership, action: Action, result: RunResult) -> RunResult:
        """Let the other hosts know, and wait until they do: one of us keeps the store."""
        ended = members.view().ended
        if action is Action.DONE:
            ended = Ended(0, "it is done")
        elif action is Action.GIVE_UP:
            ended = self._cause()
        assert ended is not None  # action END: somebody has told
        self._stop_workers(self._worker_group)
        members.end_for_all(ended)
        self._worker_group.spec.rdzv_handler.shutdown()  # hosts that wait for the next round ask once a second
        began, seconds = time.monotonic(), 1.5 if members.view().waiting else 0.0
        limit = min(self._exit_barrier_timeout, LOST_SECONDS + 1)
        while self._keeps_store and not members.view().fault:
            waited = time.monotonic() - began
            if waited > limit or (waited >= seconds and members.view().has_everybody_left):
                break
            time.sleep(0.05)
        if action is Action.END and (ended.status or result.state is not WorkerState.SUCCEEDED):
            raise JobOverError(f"the job is over: {ended.text}", ended.status)
        self._worker_group.state = result.state
        return result


def place_of(group: Any) -> tuple[int, int]:
    """This host's number in the round, and the round's number of hosts; torch sets them when the round begins."""
    return int(group.group_rank), int(group.group_world_size)


def _store_lost(why: str) -> JobOverError:
    return JobOverError(
        f"the first host of the job, which keeps the list of hosts, cannot be reached ({why}): this host ends its ranks. "
        "Start the job again; with elasticity.auto_resume it goes on from its newest checkpoint.",
        _LOST_STATUS,
    )


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Within the context, these variables are in the environment of this process, which its children inherit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
