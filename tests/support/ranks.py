"""Run one function in several ranks: real processes, gloo over loopback, every rank's failure told.

        test process                     forkserver (torch and the package loaded once)
        run_ranks(fn, 3) --- start --->  fork -> rank 0: process group, seeds, fn(0, 3, *args) --+
             ^                           fork -> rank 1: ...                                     |
             |                           fork -> rank 2: ...                                     |
             +--------- one message per rank: the result, or the traceback and when it was raised +

Why a forkserver: a spawned rank imports torch and, at its first optimizer, torch._dynamo, which took 4 s of processor time
per rank where this was measured, and the package 0.65 s more, five times what most tests then do; forked from a server that
has all loaded, three ranks start in 0.02 s. The server has no threads and no process group, so what makes plain `fork`
unsafe is absent. Loading the package chooses nothing: each rank begins with the environment that it is given (a test).

`fn` and its arguments are pickled: `fn` must be a function at the top level of its module.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed.device_mesh", "numpy", "pydantic", "pytest", "hypothesis"),
    *("deepspeed.api", "deepspeed.engine.build", "deepspeed.topology.groups"),
    *("deepspeed.utils", "deepspeed.zero.access", "deepspeed.zero.init_context"),
    *("transformers.models.llama.modeling_llama", "transformers.trainer"),
    *("deepspeed.optim.tuning_arguments", "deepspeed.runtime.lr_schedules"),
    *(f"tests.support.{name}" for name in ("clients", "engines", "models", "ranks", "reference")),
    "tests.support.warm",  # last: a rank's collector does not look at what was loaded before
)
"""What a rank finds loaded. A name that cannot be imported would be passed over."""

_GRACE_SECONDS = 5.0  # for the peers of a rank that failed: their own errors are worth having, a hang is not
_NOTICE_SECONDS = 0.25  # a death has no time stamp and may be noticed after the echo it caused; allow for this much
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(PRELOADED))


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed: `kind` is raised, died or hung; `at_seconds` is on the machine's monotonic clock."""

    rank: int
    kind: str
    at_seconds: float
    text: str
    output: str


class RanksFailed(Exception):
    """At least one rank did not return; `failures` has all that did not, earliest first, and the message shows them so."""

    def __init__(self, world_size: int, failures: list[RankFailure]) -> None:
        self.failures = sorted(failures, key=lambda failure: failure.at_seconds)
        first_seconds = self.failures[0].at_seconds
        parts = [f"{len(failures)} of {world_size} ranks failed, earliest first."]
        for failure in self.failures:
            after = f"{failure.at_seconds - first_seconds:+.3f} s"
            parts.append(f"---- rank {failure.rank} {failure.kind} ({after}) ----\n{failure.text.rstrip()}")
            if failure.output:
                parts.append(f"-- output of rank {failure.rank}, last lines --\n{failure.output}")
        super().__init__("\n".join(parts))


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: object,
    timeout_seconds: float = 60,
    env: Mapping[str, str] | None = None,
    init: bool = True,
) -> list[Any]:
    """Return `[fn(rank, world_size, *args) for rank in range(world_size)]`, each computed in its own process.

    Every rank has one torch thread, the same seeds and the launcher's environment variables, and, unless `init` is False,
    a gloo process group of all ranks. A rank that has returned stays until all are done, so that leaving early
    disturbs nobody; a rank that raises leaves at once, so that its peers notice.

    Args:
        fn: called as `fn(rank, world_size, *args)`; its result is pickled back (tensors are copied).
        world_size: number of processes.
        args: further arguments, the same for each rank.
        timeout_seconds: for the whole call; then the stacks of the ranks still running are taken and those are killed.
        env: environment variables besides this process's and the launcher's.
        init: start the default process group before `fn`; False for functions that do so themselves, with the variables.

    Raises:
        RanksFailed: when any rank raised, died or did not return in time.
    """
    payload = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        environ = {**os.environ, **_launcher_environment(world_size), **(env or {})}
        ranks = [_Rank(rank, world_size, payload, environ, folder, init) for rank in range(world_size)]
        try:
            _collect(ranks, timeout_seconds)
        finally:
            for rank in ranks:
                rank.end()
        failures = [rank.failure for rank in ranks if rank.failure is not None]
        sys.stdout.write("".join(rank.output() for rank in ranks))
        if failures:
            raise RanksFailed(world_size, failures)
        return [rank.result for rank in ranks]


class _Rank:
    """One child process, seen from the test: running, or with a `result`, or with a `failure`."""

    def __init__(
        self, rank: int, world_size: int, payload: bytes, environ: dict[str, str], folder: Path, init: bool
    ) -> None:
        self.rank = rank
        self.result: Any = None
        self.failure: RankFailure | None = None
        self.is_running = True
        self.connection, theirs = _context.Pipe()
        self._log = folder / f"rank{rank}.log"
        self._stacks = folder / f"rank{rank}.stacks"
        mine = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        arguments = (rank, world_size, payload, {**environ, **mine}, str(folder), init, theirs)
        self.process: BaseProcess = _context.Process(target=_rank_main, args=arguments, name=f"rank{rank}")
        self.process.start()
        theirs.close()

    def receive(self) -> None:
        """Take the message of the rank, or learn that it died without one."""
        self.is_running = False
        try:
            ok, at_seconds, content = pickle.loads(self.connection.recv_bytes())
        except EOFError:
            at_seconds = time.monotonic() - _NOTICE_SECONDS
            self.process.join(_GRACE_SECONDS)
            self._fail("died", at_seconds, f"ended without a result: {_exit_text(self.process.exitcode)}")
            return
        if ok:
            self.result = pickle.loads(content)
        else:
            self._fail("raised", at_seconds, content)

    def give_up(self, waited_seconds: float) -> None:
        """Record where a rank that did not return stands."""
        self.is_running = False
        now = time.monotonic()
        assert self.process.pid is not None  # it was started
        os.kill(self.process.pid, signal.SIGUSR1)  # faulthandler writes the stacks, even inside a blocking C call
        deadline = now + 2.0
        while not _size(self._stacks) and self.process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        stacks = self._stacks.read_text(errors="replace") if self._stacks.exists() else "(no stacks came)"
        self._fail("hung", now, f"had not finished after {waited_seconds:.1f} s; its stacks:\n{stacks}")

    def end(self) -> None:
        """Let a rank that has returned go (it waits for this end of the connection to close) and kill any other."""
        self.connection.close()
        if self.failure is None and not self.is_running:
            self.process.join(_GRACE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()

    def output(self, last_lines: int | None = None) -> str:
        """Return what the rank printed to standard output and error."""
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return text if last_lines is None else "\n".join(text.splitlines()[-last_lines:])

    def _fail(self, kind: str, at_seconds: float, text: str) -> None:
        self.failure = RankFailure(self.rank, kind, at_seconds, text, self.output(last_lines=30))


def _collect(ranks: list[_Rank], timeout_seconds: float) -> None:
    began = time.monotonic()
    deadline = began + timeout_seconds
    while running := [rank for rank in ranks if rank.is_running]:
        ready = wait([rank.connection for rank in running], timeout=max(0.0, deadline - time.monotonic()))
        for rank in running:
            if rank.connection in ready:
                rank.receive()
                if rank.failure is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if not ready:
            for rank in running:
                rank.give_up(time.monotonic() - began)


def _rank_main(
    rank: int, world_size: int, payload: bytes, environ: dict[str, str], folder: str, init: bool, connection: Connection
) -> None:
    """Body of one rank. Sends exactly one message, then waits until the test closes the connection."""
    log = os.open(os.path.join(folder, f"rank{rank}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stacks = open(os.path.join(folder, f"rank{rank}.stacks"), "w")  # noqa: SIM115 - faulthandler needs it open for ever
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.clear()
    os.environ.update(environ)
    try:
        _seed()
        if init:
            _start_group(rank, world_size, folder)
        fn, args = pickle.loads(payload)
        content = pickle.dumps(fn(rank, world_size, *args))
    except BaseException:
        message = (False, time.monotonic(), traceback.format_exc())
        sys.stdout.flush()
        connection.send_bytes(pickle.dumps(message))
        os._exit(1)  # at once, without clean-up that could wait for peers
    sys.stdout.flush()
    connection.send_bytes(pickle.dumps((True, time.monotonic(), content)))
    wait([connection])  # readable when the test has closed its end
    _stop_group()


def _seed() -> None:
    import numpy
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)


def _start_group(rank: int, world_size: int, folder: str) -> None:
    import torch.distributed as dist

    # Longer than any run, so that a hang is reported by run_ranks, with stacks, and not by one rank's own time-out.
    timeout = timedelta(minutes=15)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", timeout=timeout, world_size=world_size, rank=rank)


def _stop_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _launcher_environment(world_size: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }


def _exit_text(exitcode: int | None) -> str:
    if exitcode is None:
        return "still running, but its connection is closed"
    if exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit status {exitcode}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def helper_pids() -> Iterable[int]:
    """Processes that multiprocessing keeps for the whole test run: the forkserver and the resource tracker."""
    from multiprocessing import forkserver, resource_tracker

    known = (forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid)
    return [pid for pid in known if pid is not None]
