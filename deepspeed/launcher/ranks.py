"""The ranks of one host: their commands, their start, and their end without a trace.

```
   commands --> start_rank (each in a session of its own) --> reap ... --> stop (ask, wait, at most GRACE_SECONDS)
                                                                       --> end_the_rest (nothing of the job stays)
                                                                       --> report (who failed, how, what it wrote last)
```

Does not live here: when to do which (`launch`, `elastic_host`), how processes are ended (`processes`), where output goes
(`output`).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import logging
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed.common.logging import get_logger
from deepspeed.errors import LaunchError
from deepspeed.launcher import numa
from deepspeed.launcher.arguments import rank_argv
from deepspeed.launcher.devices import hides_all, visible_devices_name
from deepspeed.launcher.hostfile import ResourceError, Slot
from deepspeed.launcher.output import LogFile, PassedOn, RankOutput, finish, free_note, log_paths
from deepspeed.launcher.placement import RankPlace
from deepspeed.launcher.processes import descendants, end_processes, signal_name, start_process

__all__ = [
    "GRACE_SECONDS",
    "Command",
    "Rank",
    "commands_of",
    "end_the_rest",
    "outputs_of",
    "reap",
    "report",
    "start_rank",
    "stop",
]

logger = get_logger("deepspeed.launcher.launch")  # the name under which users know these messages

GRACE_SECONDS = 3.0
"""Between asking the ranks to end and ending them; the whole job must be gone in 5."""

_STRAY_SECONDS = 0.75
"""What helpers of ended ranks get to finish by themselves, and again between asking and ending them."""


@dataclass(frozen=True)
class Command:
    """What one rank runs."""

    place: RankPlace
    argv: list[str]
    environment: dict[str, str]
    cores: tuple[int, ...] | None = None
    """Cores to bind the process to, where `argv` does not do it."""


@dataclass
class Rank:
    """One started rank."""

    place: RankPlace
    process: subprocess.Popen[bytes]
    output: RankOutput
    is_stopped: bool = False
    """By SIGSTOP or its like: it does nothing, and hears nothing, until SIGCONT."""

    @property
    def exit_status(self) -> int | None:
        """As a shell tells it: 128 + n for signal n; None while the rank runs."""
        code = self.process.returncode
        return 128 - code if code is not None and code < 0 else code

    @property
    def how_it_ended(self) -> str:
        """For messages; of a rank that has ended."""
        code = self.process.returncode
        if code >= 0:
            return f"exit status {code}"
        because = ", which the kernel sends when memory runs out" if -code == signal.SIGKILL else ""
        return f"signal {-code} ({signal_name(-code)}){because}"


def commands_of(
    args: argparse.Namespace, places: Sequence[RankPlace], slots: Sequence[Slot], environ: Mapping[str, str]
) -> list[Command]:
    """The commands of ranks of this host.

    Args:
        args: what `parse_launch_args` returned.
        places: the places of the ranks.
        slots: the devices the job may use on this host.
        environ: the environment to extend.

    Raises:
        LaunchError: cores cannot be bound as asked, or flags exclude each other.
    """
    if args.module and args.no_python:
        raise ResourceError("--module runs the script by `python -m`, --no_python without python: give one of them.")
    visible = visible_devices_name(environ)
    base = dict(environ)
    if not hides_all(environ.get(visible)):
        base[visible] = ",".join(map(str, slots))
    commands = [
        Command(place, rank_argv(args, place.local_rank), base | place.environment(args.master_addr, args.master_port))
        for place in places
    ]
    return _bound_to_cores(commands, args.bind_core_list, environ) if args.bind_cores_to_rank else commands


def _bound_to_cores(commands: Sequence[Command], core_list: str | None, environ: Mapping[str, str]) -> list[Command]:
    numa.check_affinity_conflict(environ)
    cores = numa.parse_range_list(core_list) if core_list else numa.machine_cores()
    has_numactl = shutil.which("numactl") is not None
    if not has_numactl:
        logger.info("numactl is not installed: cores are bound, memory goes where the kernel puts it")
    bound = []
    for command in commands:
        mine = numa.cores_of_rank(cores, command.place.local_size, command.place.local_rank)
        prefix = numa.numactl_argv(mine, numa.machine_nodes()) if has_numactl else []
        environment = {**command.environment, "OMP_NUM_THREADS": str(len(mine))}
        bound.append(Command(command.place, prefix + command.argv, environment, None if has_numactl else tuple(mine)))
    return bound


def outputs_of(log_folder: str, ranks: Sequence[int]) -> list[RankOutput]:
    """Where the output of `ranks` goes: through us, or, unless `log_folder` is "None", to a file each.

    Raises:
        LogFolderError: no file can be made in the folder.
    """
    if log_folder == "None":
        return [PassedOn() for _ in ranks]
    return [LogFile(path) for path in log_paths(Path(log_folder), list(ranks), datetime.datetime.now())]


def start_rank(command: Command, output: RankOutput) -> Rank:
    """Start one rank. Call `output.started` after the start of the last one, not between: it may start threads.

    Raises:
        LaunchError: the command cannot be run.
    """
    stdout, stderr = output.streams()
    try:
        process = start_process(
            command.argv, command.environment, signal.SIGKILL, stdout=stdout, stderr=stderr, cores=command.cores
        )
    except OSError as error:
        raise LaunchError(f"rank {command.place.rank} cannot run {command.argv[0]!r}: {error.strerror}.") from error
    logger.debug("rank %d is process %d: %s", command.place.rank, process.pid, command.argv)
    return Rank(command.place, process, output)


def reap(ranks: Sequence[Rank]) -> list[Rank]:
    """Take note of children that have ended; return the ranks among them in the order the kernel tells.

    Ranks that were stopped, or go on, are told to the user: nobody else can tell a stopped rank from a slow one.
    """
    by_pid = {rank.process.pid: rank for rank in ranks}
    ended = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not pid:
                break
            rank = by_pid.get(pid)  # else an adopted orphan
            if rank is None:
                continue
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                _note_stop(rank, os.WSTOPSIG(status) if os.WIFSTOPPED(status) else None)
            else:
                rank.process.returncode = os.waitstatus_to_exitcode(status)
                ended.append(rank)
    return ended


def _note_stop(rank: Rank, signum: int | None) -> None:
    """Take note that the signal `signum` has stopped the rank, or that it goes on (None)."""
    rank.is_stopped = signum is not None
    pid, host = rank.process.pid, socket.gethostname()
    if signum is None:
        logger.info("rank %d (process %d on %s) goes on", rank.place.rank, pid, host)
    else:
        logger.warning(
            "rank %d (process %d on %s) was stopped by %s, and the others wait for it: `kill -CONT %d` lets it go on",
            rank.place.rank,
            pid,
            host,
            signal_name(signum),
            pid,
        )


def stop(ranks: Sequence[Rank], signum: int, wait: Callable[[float], bool]) -> None:
    """Ask the ranks to end, and wait for that at most `GRACE_SECONDS`. Stopped ones go on, or they would not hear it.

    Args:
        ranks: all ranks of this host; those that have ended are left alone.
        signum: what they are asked with.
        wait: waits at most so many seconds for a child to end, calls `reap`, and tells whether to wait no longer.
    """
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or made another user's by sudo
            if rank.exit_status is not None:
                continue
            if signum == signal.SIGINT:  # as a terminal does: the whole group
                os.killpg(rank.process.pid, signum)
            else:  # the rank alone: it may save its work, for which it needs its helpers
                os.kill(rank.process.pid, signum)
            if rank.is_stopped:
                os.killpg(rank.process.pid, signal.SIGCONT)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(rank.exit_status is None for rank in ranks) and (left := deadline - time.monotonic()) > 0:
        if wait(left):
            return


def end_the_rest(ranks: Sequence[Rank], pause: Callable[[float], object] = time.sleep) -> None:
    """Let no process of the job outlive this function, and no word of theirs: blocks a second or two at most.

    Args:
        ranks: all ranks of this launcher.
        pause: waits so many seconds, while output is still on its way.
    """
    _end_processes_of(ranks)
    finish([rank.output for rank in ranks], pause)


def _end_processes_of(ranks: Sequence[Rank]) -> None:
    """End ranks that did not end, and what ranks left behind."""
    if any(rank.process.returncode is None for rank in ranks):
        end_processes(spared=(), seconds=0)
        reap(ranks)
        return
    # Helpers that see their rank's end (resource trackers, uploaders) get the time to finish their work.
    deadline = time.monotonic() + _STRAY_SECONDS
    while _has_children() and time.monotonic() < deadline:
        time.sleep(0.01)
        reap(ranks)
    if _has_children():
        is_expected = any(rank.exit_status for rank in ranks)  # of ranks that were ended, but not of ranks that were done
        pids = ", ".join(str(process.pid) for process in descendants())
        level = logging.DEBUG if is_expected else logging.WARNING
        logger.log(level, "ranks left processes behind, which are ended now: %s", pids)
        end_processes(spared=(), seconds=_STRAY_SECONDS)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def report(failed: Rank, host: str | None = None) -> None:
    """Say which rank failed first, how, and what it wrote last; after `end_the_rest`.

    Args:
        failed: the rank.
        host: its host's name; None where there is one host only.
    """
    tail = failed.output.tail() or "(nothing)"
    where = f" on host {host}" if host else ""
    full = ""
    if isinstance(failed.output, LogFile):
        full = f" (all of it is in {failed.output.path}{free_note(failed.output.path)})"
    lines = "\n".join(f"[rank {failed.place.rank}] {line}" for line in tail.split("\n"))
    logger.error(
        "rank %d%s failed first, with %s; it wrote last%s:\n%s",
        failed.place.rank,
        where,
        failed.how_it_ended,
        full,
        lines,
    )
