"""The launcher of one host: one process per rank, watched until the last one has ended.

```
   start all ranks --> wait for a signal
                         |-- a child ended with 0 -----------> others go on; all ended: status 0
                         |-- a child ended otherwise --------> stop (SIGTERM), its status
                         |-- SIGINT, SIGTERM, SIGHUP, or the
                         |   runner is gone (then SIGTERM) --> stop (the same signal), 128 + its number
   stop: the signal to every rank; GRACE seconds later, or when all ranks have ended, end whatever is left
```

The exit status is that of the first rank that failed: its own status, or 128 + n when signal n ended it. The runner starts
this as `python -m deepspeed.launcher.launch`, here or on another host.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed.common.logging import get_logger, set_log_level_from_string
from deepspeed.errors import DeepSpeedError, LaunchError
from deepspeed.launcher import numa
from deepspeed.launcher.arguments import parse_launch_args, rank_argv
from deepspeed.launcher.devices import hides_all, visible_devices_name
from deepspeed.launcher.hostfile import ResourceError, decode_world_info
from deepspeed.launcher.output import LogFile, PassedOn, RankOutput, log_paths
from deepspeed.launcher.pidfile import pid_file
from deepspeed.launcher.placement import RankPlace, place_ranks
from deepspeed.launcher.processes import SignalInbox, adopting_orphans, descendants, end_processes, start_process

__all__ = ["GRACE_SECONDS", "Command", "Rank", "main", "rank_commands", "run"]

logger = get_logger("deepspeed.launcher.launch")  # also when the module runs as __main__

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

    @property
    def exit_status(self) -> int | None:
        """As a shell tells it: 128 + n for signal n; None while the rank runs."""
        code = self.process.returncode
        return 128 - code if code is not None and code < 0 else code


def rank_commands(args: argparse.Namespace, environ: Mapping[str, str]) -> list[Command]:
    """The commands of this host's ranks.

    Args:
        args: what `parse_launch_args` returned.
        environ: the environment to extend.

    Raises:
        LaunchError: the world info, the node rank or the cores cannot be used, or flags exclude each other.
    """
    if args.world_info == "None":
        raise ResourceError("--world_info was not given: start jobs through the deepspeed command, which makes it.")
    if args.module and args.no_python:
        raise ResourceError("--module runs the script by `python -m`, --no_python without python: give one of them.")
    world_info = decode_world_info(args.world_info)
    places = place_ranks(world_info, args.node_rank)
    slots = list(world_info.values())[args.node_rank]
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
        mine = numa.cores_of_rank(cores, len(commands), command.place.local_rank)
        prefix = numa.numactl_argv(mine, numa.machine_nodes()) if has_numactl else []
        environment = {**command.environment, "OMP_NUM_THREADS": str(len(mine))}
        bound.append(Command(command.place, prefix + command.argv, environment, None if has_numactl else tuple(mine)))
    return bound


def run(args: argparse.Namespace) -> int:
    """Run this host's ranks to their end and return the exit status of the job.

    Args:
        args: what `parse_launch_args` returned.

    Raises:
        LaunchError: the ranks cannot be started as asked; none is left running.
    """
    set_log_level_from_string("error" if args.quiet else args.log_level)
    commands = rank_commands(args, os.environ)
    outputs = _outputs(args.enable_each_rank_log, [command.place.rank for command in commands])
    signums = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with SignalInbox(*signums) as inbox, adopting_orphans(), pid_file(args.save_pid):
        ranks: list[Rank] = []
        try:
            for command, output in zip(commands, outputs, strict=True):
                ranks.append(_start(command, output))
            for rank in ranks:
                rank.output.started()  # after the last fork: these are threads
            first = _watch(ranks, inbox)
        finally:
            _end_the_rest(ranks)
    return _report(first, ranks) if isinstance(first, Rank) else first


def _outputs(log_folder: str, ranks: list[int]) -> list[RankOutput]:
    if log_folder == "None":
        return [PassedOn() for _ in ranks]
    now = datetime.datetime.now()
    return [LogFile(path) for path in log_paths(Path(log_folder), ranks, now)]


def _start(command: Command, output: RankOutput) -> Rank:
    stdout, stderr = output.streams()
    try:
        process = start_process(
            command.argv, command.environment, signal.SIGKILL, stdout=stdout, stderr=stderr, cores=command.cores
        )
    except OSError as error:
        raise LaunchError(f"rank {command.place.rank} cannot run {command.argv[0]!r}: {error.strerror}.") from error
    logger.debug("rank %d is process %d: %s", command.place.rank, process.pid, command.argv)
    return Rank(command.place, process, output)


def _watch(ranks: Sequence[Rank], inbox: SignalInbox) -> Rank | int:
    """Wait for the end of the job; return the rank that failed first, or the exit status when none did."""
    while True:
        received = [signum for signum in inbox.wait(None) if signum != signal.SIGCHLD]
        ended = _reap(ranks)
        failed = [rank for rank in ended if rank.exit_status]
        if failed:
            _stop(ranks, inbox, signal.SIGTERM)
            return min(failed, key=lambda rank: rank.process.returncode > 0)  # of several, the one a signal ended
        if received:
            logger.info("received %s: ending the job", signal.Signals(received[0]).name)
            _stop(ranks, inbox, signal.Signals(received[0]))
            return 128 + received[0]
        if all(rank.exit_status == 0 for rank in ranks):
            return 0


def _reap(ranks: Sequence[Rank]) -> list[Rank]:
    """Take note of children that have ended; return the ranks among them in the order the kernel tells."""
    by_pid = {rank.process.pid: rank for rank in ranks}
    ended = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            rank = by_pid.get(pid)  # else an adopted orphan
            if rank is not None:
                rank.process.returncode = os.waitstatus_to_exitcode(status)
                ended.append(rank)
    return ended


def _stop(ranks: Sequence[Rank], inbox: SignalInbox, signum: signal.Signals) -> None:
    """Ask the ranks to end, and wait for that at most `GRACE_SECONDS`; a second request ends the waiting."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            if rank.exit_status is not None:
                continue
            if signum == signal.SIGINT:  # as a terminal does: the whole group
                os.killpg(rank.process.pid, signum)
            else:  # the rank alone: it may save its work, for which it needs its helpers
                os.kill(rank.process.pid, signum)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(rank.exit_status is None for rank in ranks) and (left := deadline - time.monotonic()) > 0:
        if set(inbox.wait(left)) - {signal.SIGCHLD}:
            return
        _reap(ranks)


def _end_the_rest(ranks: Sequence[Rank]) -> None:
    """Let no process of the job outlive this function: ranks that did not end, and what ranks left behind."""
    if any(rank.process.returncode is None for rank in ranks):
        end_processes(spared=(), seconds=0)
        return
    # Helpers that see their rank's end (resource trackers, uploaders) get the time to finish their work.
    deadline = time.monotonic() + _STRAY_SECONDS
    while _has_children() and time.monotonic() < deadline:
        time.sleep(0.01)
        _reap(ranks)
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


def _report(failed: Rank, ranks: Sequence[Rank]) -> int:
    """Say which rank failed first, how, and what it wrote last; return its exit status."""
    code = failed.process.returncode
    how = f"exit status {code}"
    if code < 0:
        how = f"signal {-code} ({signal.Signals(-code).name})"
        how += ", which the kernel sends when memory runs out" if -code == signal.SIGKILL else ""
    place = failed.place
    tail = failed.output.tail() or "(nothing)"
    for rank in ranks:
        rank.output.tail()  # all of it must be on the screen before the report
    where = f" on host {place.node_rank}" if place.node_count > 1 else ""
    full = f" (all of it is in {failed.output.path})" if isinstance(failed.output, LogFile) else ""
    lines = "\n".join(f"[rank {place.rank}] {line}" for line in tail.split("\n"))
    logger.error("rank %d%s failed first, with %s; it wrote last%s:\n%s", place.rank, where, how, full, lines)
    status = failed.exit_status
    assert status is not None  # it has ended, or it would not have failed
    return status


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line `args` (None: that of this process) and exit with the job's status."""
    try:
        status = run(parse_launch_args(args))
    except DeepSpeedError as error:
        logger.error("%s", error)
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    main()
