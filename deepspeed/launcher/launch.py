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
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from deepspeed.common.logging import get_logger, set_log_level_from_string
from deepspeed.errors import DeepSpeedError
from deepspeed.launcher.arguments import parse_launch_args
from deepspeed.launcher.hostfile import ResourceError, decode_world_info
from deepspeed.launcher.pidfile import pid_file
from deepspeed.launcher.placement import place_ranks
from deepspeed.launcher.processes import SignalInbox, adopting_orphans
from deepspeed.launcher.ranks import Command, Rank, commands_of, end_the_rest, outputs_of, reap, report, start_rank, stop

__all__ = ["main", "rank_commands", "run"]

logger = get_logger("deepspeed.launcher.launch")  # also when the module runs as __main__


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
    world_info = decode_world_info(args.world_info)
    places = place_ranks(world_info, args.node_rank)
    return commands_of(args, places, list(world_info.values())[args.node_rank], environ)


def run(args: argparse.Namespace) -> int:
    """Run this host's ranks to their end and return the exit status of the job.

    Args:
        args: what `parse_launch_args` returned.

    Raises:
        LaunchError: the ranks cannot be started as asked; none is left running.
    """
    set_log_level_from_string("error" if args.quiet else args.log_level)
    commands = rank_commands(args, os.environ)
    outputs = outputs_of(args.enable_each_rank_log, [command.place.rank for command in commands])
    signums = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with SignalInbox(*signums) as inbox, adopting_orphans(), pid_file(args.save_pid):
        ranks: list[Rank] = []
        try:
            for command, output in zip(commands, outputs, strict=True):
                ranks.append(start_rank(command, output))
            for rank in ranks:
                rank.output.started()  # after the last fork: these are threads
            first = _watch(ranks, inbox)
        finally:
            end_the_rest(ranks)
    if not isinstance(first, Rank):
        return first
    names = list(decode_world_info(args.world_info))
    report(first, names[args.node_rank] if len(names) > 1 else None)
    assert first.exit_status is not None  # it has ended, or it would not have failed
    return first.exit_status


def _watch(ranks: Sequence[Rank], inbox: SignalInbox) -> Rank | int:
    """Wait for the end of the job; return the rank that failed first, or the exit status when none did."""

    def wait(seconds: float) -> bool:
        is_asked = bool(set(inbox.wait(seconds)) - {signal.SIGCHLD})
        reap(ranks)
        return is_asked

    while True:
        received = [signum for signum in inbox.wait(None) if signum != signal.SIGCHLD]
        failed = [rank for rank in reap(ranks) if rank.exit_status]
        if failed:
            stop(ranks, signal.SIGTERM, wait)
            return min(failed, key=lambda rank: rank.process.returncode > 0)  # of several, the one a signal ended
        if received:
            logger.info("received %s: ending the job", signal.Signals(received[0]).name)
            stop(ranks, received[0], wait)
            return 128 + received[0]
        if all(rank.exit_status == 0 for rank in ranks):
            return 0


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
