"""The launcher: starts ranks of one host, watches them until the last one has ended, and ends them when the job ends.

```
   meet the other launchers --> start all ranks --> wait
                                     |-- a rank ended with 0 --------> others go on; all ended: status 0
                                     |-- a rank ended otherwise -----> the job ends: stop (SIGTERM), its status
                                     |-- SIGINT, SIGTERM, SIGHUP, or our runner is gone (then SIGTERM)
                                     |                           ----> the job ends: stop (the same signal), 128 + its number
                                     '-- the link says that the job ends (launcher.link) --> stop, the cause's status
   stop: the signal to every rank; GRACE_SECONDS later, or when all ranks have ended, end whatever is left
```

The exit status is that of the first rank of the job that failed: its own status, or 128 + n when signal n ended it. The
runner starts this as `python -m deepspeed.launcher.launch`: here once; on other hosts once per host (--node_rank), or, where
a scheduler starts and numbers processes, once per rank (--from_scheduler). A job of one launcher has no link.

[Note: patience] When a process that it started exits with another status than 0, Open MPI ends all others, which takes it
seconds even when they are about to leave. When all launchers are done and the runner has heard over the link why, a launcher
under Open MPI therefore exits with 0: the runner has the status. Where one is lost, ending the rest is right.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from deepspeed.common.logging import get_logger, set_log_level_from_string
from deepspeed.errors import DeepSpeedError, LaunchError
from deepspeed.launcher.arguments import parse_launch_args
from deepspeed.launcher.devices import devices_from_slurm
from deepspeed.launcher.guard import run_guarded
from deepspeed.launcher.link.cause import Alone, Cause, Link
from deepspeed.launcher.link.hangup import HangUpWatch
from deepspeed.launcher.loop import Loop
from deepspeed.launcher.output import RankOutput
from deepspeed.launcher.pidfile import pid_file, remove_stale
from deepspeed.launcher.processes import SignalInbox, adopting_orphans, signal_name
from deepspeed.launcher.ranks import Command, Rank, commands_of, end_the_rest, outputs_of, reap, report, start_rank, stop
from deepspeed.launcher.seat import TOKEN_NAME, Seat, read_seat

__all__ = ["main", "rank_commands", "run"]

logger = get_logger("deepspeed.launcher.launch")  # also when the module runs as __main__


def rank_commands(args: argparse.Namespace, environ: Mapping[str, str]) -> list[Command]:
    """The commands of the ranks that this launcher starts.

    Args:
        args: what `parse_launch_args` returned.
        environ: the environment to extend.

    Raises:
        LaunchError: the world info, our place or the cores cannot be used, or flags exclude each other.
    """
    return _commands(args, read_seat(args, environ), environ)


def _commands(args: argparse.Namespace, seat: Seat, environ: Mapping[str, str]) -> list[Command]:
    kept = {name: value for name, value in environ.items() if name != TOKEN_NAME}
    handed_out = devices_from_slurm(environ) if args.from_scheduler == "slurm" else []
    return commands_of(args, seat.places, handed_out or seat.slots, kept)


def run(args: argparse.Namespace) -> int:
    """Run our ranks to the end of the job and return what this process must exit with: the job's status; [Note: patience].

    Args:
        args: what `parse_launch_args` returned.

    Raises:
        LaunchError: the ranks cannot be started as asked; none is left running.
    """
    set_log_level_from_string("error" if args.quiet else args.log_level)
    seat = read_seat(args, os.environ)
    if args.enable_elastic_training:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # torch reads it when it is loaded; what it warns of, we tell
        elastic = importlib.import_module("deepspeed.launcher.elastic_host")  # it loads torch, which other jobs do not
        return int(elastic.run(args, seat))
    commands = _commands(args, seat, os.environ)
    outputs = outputs_of(args.enable_each_rank_log, [command.place.rank for command in commands])
    with (
        SignalInbox(signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as inbox,
        adopting_orphans(),
        pid_file(args.save_pid if seat.number == 0 else 0),
        Loop() as loop,
    ):
        watch = _Watch(seat, _open_link(args, seat, loop), loop, inbox)
        try:
            cause = watch.run(commands, outputs)
        finally:
            watch.link.close()
    status = _told(cause, seat, watch)
    return 0 if args.from_scheduler == "openmpi" and watch.link.is_settled else status


def _told(cause: Cause | None, seat: Seat, watch: _Watch) -> int:
    """Tell the user what is ours to tell of the end of the job; return its exit status."""
    if cause is None:
        return 0
    if cause.member == seat.number and watch.first_failed is not None:
        report(watch.first_failed, seat.host if seat.is_linked else None)
    elif seat.is_linked and not seat.has_front_end:
        logger.error("%s", cause.text)
    return cause.status


def _open_link(args: argparse.Namespace, seat: Seat, loop: Loop) -> Link:
    if not seat.is_linked:
        return Alone()
    # Not at the top of the file: what a link needs would make every start of a job on one host wait.
    job_module = importlib.import_module("deepspeed.launcher.link.job")
    opening = importlib.import_module("deepspeed.launcher.link.opening")
    job = job_module.linked_job(
        seat.world_info,
        args.master_addr,
        args.master_port,
        os.environ.get(TOKEN_NAME, ""),
        has_front_end=seat.has_front_end,
        is_per_rank=seat.is_per_rank,
    )
    link: Link = opening.open_link(job, seat.number, loop)
    return link


class _Watch:
    """The life of our ranks."""

    def __init__(self, seat: Seat, link: Link, loop: Loop, inbox: SignalInbox) -> None:
        self.link = link
        self.first_failed: Rank | None = None
        self._ranks: list[Rank] = []
        self._seat = seat
        self._loop = loop
        self._inbox = inbox
        self._requests = 0
        loop.watch(inbox, self._take_signals)
        if seat.has_front_end:
            self._hang_up = HangUpWatch()
            loop.watch(self._hang_up, self._take_hang_up)

    def run(self, commands: Sequence[Command], outputs: Sequence[RankOutput]) -> Cause | None:
        """Run the ranks to the end of the job; return why it ended, None when all ranks are done.

        Raises:
            LaunchError: a rank cannot be started.
        """
        try:
            self._wait_while(lambda: not self.link.may_start)
            if self.link.cause is None:
                self._start(commands, outputs)
                self._wait_while(lambda: any(rank.exit_status is None for rank in self._ranks))
            if self.link.cause is not None:
                stop(self._ranks, self.link.cause.signum, self._wait_for_end)
        except LaunchError as error:
            self.link.failed(Cause(1, f"host {self._seat.host}: {error}"))
            raise
        finally:
            end_the_rest(self._ranks, lambda seconds: self._wait(time.monotonic() + seconds))
            self.link.done()
            while not self.link.is_over:
                self._wait(float("inf"))
        return self.link.cause

    def _start(self, commands: Sequence[Command], outputs: Sequence[RankOutput]) -> None:
        for command, output in zip(commands, outputs, strict=True):
            self._ranks.append(start_rank(command, output))
        for rank in self._ranks:
            rank.output.started()  # after the last fork: these are threads

    def _wait_while(self, claim: Callable[[], bool]) -> None:
        while self.link.cause is None and claim():
            self._wait(float("inf"))

    def _wait(self, until: float) -> None:
        self._loop.wait(min(until, self.link.next_time))
        self.link.tick()
        failed = [rank for rank in reap(self._ranks) if rank.exit_status]
        if failed and self.link.cause is None:
            first = min(failed, key=lambda rank: rank.process.returncode > 0)  # of several, the one a signal ended
            self.first_failed = first
            self.link.failed(self._cause_of(first))

    def _wait_for_end(self, seconds: float) -> bool:
        self._wait(time.monotonic() + seconds)
        return self.link.is_hurried or self._requests > 1

    def _cause_of(self, rank: Rank) -> Cause:
        status = rank.exit_status
        assert status is not None  # it has failed
        text = f"rank {rank.place.rank} on host {self._seat.host} failed first, with {rank.how_it_ended}"
        return Cause(status, text, member=self._seat.number, may_be_echo=rank.process.returncode > 0)

    def _take_signals(self) -> None:
        for signum in self._inbox.read():
            if signum == signal.SIGCHLD:
                continue
            self._requests += 1
            name = signal_name(signum)
            if self.link.cause is None:
                logger.info("received %s: ending the job", name)
            elif not self._seat.is_linked:
                self._requests = (
                    2  # the job ends already, and somebody wants it sooner; a scheduler asks every launcher once
                )
            self.link.failed(Cause(128 + signum, f"the launcher on host {self._seat.host} received {name}", signum=signum))

    def _take_hang_up(self) -> None:
        self._loop.forget(self._hang_up)
        text = f"host {self._seat.host} lost the connection to the command that started the job"
        self.link.failed(Cause(255, text))


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line `args` (None: that of this process) and exit with the job's status."""
    parsed = parse_launch_args(args)
    if not parsed.front_end:
        sys.exit(_status(parsed))
    status = run_guarded(lambda: _status(parsed))  # the command that could clear up after us is far
    if parsed.save_pid:
        remove_stale(parsed.save_pid)
    sys.exit(status)


def _status(args: argparse.Namespace) -> int:
    try:
        return run(args)
    except DeepSpeedError as error:
        logger.error("%s", error)
        return 1


if __name__ == "__main__":
    main()
