"""An elastic job on several hosts, seen from the command of the user: each host's launcher, started again when it ended.

```
   one pdsh per host --> ended with 0: the host is done      ended otherwise: start it again, 2 s later, then less often
   the first host's launcher ends: the job is over, with its status; the others end by themselves
```

There is no list of reasons for which a host may come back: a host that was off, cut off or frozen, whose ssh broke or whose
launcher was killed, and one that is misconfigured, are all tried again as long as the job lives.

Does not live here: who takes part in a round (`elastic_host`), the command lines (`backends`), where the hosts meet
(`far_hosts`). `runner` calls it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deepspeed.common.logging import get_logger
from deepspeed.errors import LaunchError
from deepspeed.launcher import far_hosts
from deepspeed.launcher.arguments import launch_words
from deepspeed.launcher.backends import BACK_ENDS, Command
from deepspeed.launcher.environment import excluded
from deepspeed.launcher.guard import run_guarded
from deepspeed.launcher.hostfile import Slot, encode_world_info
from deepspeed.launcher.pidfile import pid_file, remove_stale
from deepspeed.launcher.processes import SignalInbox, adopting_orphans, end_processes, signal_name, start_process
from deepspeed.launcher.seat import TOKEN_NAME

__all__ = ["delay_seconds", "run"]

logger = get_logger("deepspeed.launcher.runner")  # the name under which users know these messages

_SSH_OPTIONS = "-o ConnectTimeout=5 -o ServerAliveInterval=2 -o ServerAliveCountMax=2"
"""So that a host that went away without a word is noticed."""

_FIRST_DELAY_SECONDS = 2.0
_LONGEST_DELAY_SECONDS = 30.0
_SETTLED_SECONDS = 60.0
_LEAVE_SECONDS = 10.0
"""What the other hosts get to end by themselves when the job is over."""


def delay_seconds(ends_in_a_row: int) -> float:
    """How long to wait before a host is started again that ended so many times, soon after its start each time."""
    return float(min(_FIRST_DELAY_SECONDS * 2 ** (ends_in_a_row - 1), _LONGEST_DELAY_SECONDS))


@dataclass
class _Host:
    """The launcher of one host, over and over."""

    name: str
    command: Command
    environ: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    is_done: bool = False
    ends_in_a_row: int = 0
    due_seconds: float = 0.0
    """When it is started (again), on the monotonic clock."""
    began_seconds: float = 0.0

    def start(self) -> None:
        """Start it."""
        if self.ends_in_a_row:
            logger.info("host %s: its launcher is started again", self.name)
        self.process = start_process(self.command.argv, self.environ, signal.SIGTERM)
        self.began_seconds = time.monotonic()

    def ended(self) -> int | None:
        """The status with which it has ended just now; None when it has not."""
        status = None if self.process is None else self.process.poll()
        if status is None:
            return None
        self.process = None
        return 128 - status if status < 0 else status

    def try_again(self, status: int) -> None:
        """Note when, and tell the user."""
        now = time.monotonic()
        self.ends_in_a_row = 1 if now - self.began_seconds > _SETTLED_SECONDS else self.ends_in_a_row + 1
        delay = delay_seconds(self.ends_in_a_row)
        self.due_seconds = now + delay
        because = " (the host, or ssh to it, is lost)" if status == 255 else ""
        logger.warning(
            "host %s: its launcher ended with status %d%s; the job goes on without it, and it is tried again in %g s",
            self.name,
            status,
            because,
            delay,
        )


def run(
    args: argparse.Namespace,
    selection: Mapping[str, Sequence[Slot]],
    environ: Mapping[str, str],
    from_files: Mapping[str, str],
) -> int:
    """Run the job to its end and return its exit status; the arguments are those of `far_hosts.run`.

    Raises:
        LaunchError: it cannot be started as asked.
    """
    if args.launcher != "pdsh":
        raise LaunchError(
            f"--elastic_training with --launcher {args.launcher}: needed pdsh, or --no_ssh on each host, which start each "
            "host by itself. Leave --launcher out."
        )
    back_end = BACK_ENDS[args.launcher]
    program = back_end.find(far_hosts.InstalledPrograms())
    pid = os.getpid() if args.save_pid else 0
    with contextlib.ExitStack() as leases, pid_file(pid):
        meeting = far_hosts.find_meeting(args, selection, leases)
        logger.info("elastic job on %s, meeting at %s:%d", ", ".join(selection), meeting.address, meeting.port)
        environ = {**environ, TOKEN_NAME: secrets.token_hex(16)}
        words = launch_words(args, encode_world_info(selection), *meeting, front_end=True)
        scratch = Path(tempfile.gettempdir())  # pdsh needs no file of ours there
        job = far_hosts.make_job(args, selection, words, environ, from_files, scratch)
        mine = {name: value for name, value in environ.items() if name not in excluded(environ)}
        hosts = []
        for number, (name, slots) in enumerate(selection.items()):
            command = back_end.command(replace(job, hosts={name: slots}, place=(f"--node_rank={number}",)), program)
            hosts.append(_Host(name, command, _patient(mine | command.environ)))
        return run_guarded(lambda: _attend(hosts, pid))  # else ssh sessions would outlive a command that is killed


def _patient(environ: dict[str, str]) -> dict[str, str]:
    name = "PDSH_SSH_ARGS_APPEND"
    return environ | {name: f"{environ.get(name, '')} {_SSH_OPTIONS}".strip()}


def _attend(hosts: Sequence[_Host], pid: int) -> int:
    """Start the hosts, and again, until the first one's launcher ends or we are asked to end.

    Args:
        hosts: in order.
        pid: of the command, which names its file; 0: there is none.
    """
    signums = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with adopting_orphans(), SignalInbox(*signums) as inbox:
        try:
            while True:
                now = time.monotonic()
                for host in hosts:
                    if host.process is None and not host.is_done and host.due_seconds <= now:
                        host.start()
                waits = [max(0.0, host.due_seconds - now) for host in hosts if host.process is None and not host.is_done]
                received = [number for number in inbox.wait(min(waits, default=None)) if number != signal.SIGCHLD]
                if received:
                    logger.info("received %s: ending the job", signal_name(received[0]))
                    return 128 + received[0]
                status = _take_ends(hosts)
                if status is not None:
                    _let_leave(hosts, inbox)
                    return status
        finally:
            end_processes(spared=(), seconds=1)  # a launcher far away sees that nobody reads it any more, and ends its ranks
            if pid:
                remove_stale(pid)  # the command may have been killed


def _take_ends(hosts: Sequence[_Host]) -> int | None:
    """Note which launchers have ended; the exit status of the job when the first host's has."""
    for host in hosts[1:]:
        status = host.ended()
        if status == 0:
            host.is_done = True
        elif status is not None:
            host.try_again(status)
    status = hosts[0].ended()
    if status == 255:
        logger.error(
            "host %s, or ssh to it, is lost: it keeps the list of hosts, so the job is over. Start it again; with "
            "elasticity.auto_resume it goes on from its newest checkpoint.",
            hosts[0].name,
        )
    return status


def _let_leave(hosts: Sequence[_Host], inbox: SignalInbox) -> None:
    """Let launchers that have learnt that the job is over end by themselves, so that their last words arrive."""
    deadline = time.monotonic() + _LEAVE_SECONDS
    while any(host.process is not None for host in hosts) and (left := deadline - time.monotonic()) > 0:
        if set(inbox.wait(left)) - {int(signal.SIGCHLD)}:
            return
        for host in hosts:
            host.ended()
