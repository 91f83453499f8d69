"""A job on several hosts, seen from the command of the user: where it meets, what starts its members, how it ends.

```
   first host --> address, port (probe) --> Job --> back end: one command line --> start it, attend it --> exit status
```

Does not live here: which hosts and slots (`runner`), the command lines (`backends`), the members (`launch`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from deepspeed.common.exported import EXPORTED_PREFIXES
from deepspeed.common.logging import get_logger
from deepspeed.errors import LaunchError
from deepspeed.launcher.arguments import LaunchWords, launch_words
from deepspeed.launcher.backends import BACK_ENDS, Command, Job
from deepspeed.launcher.devices import likely_accelerator
from deepspeed.launcher.environment import excluded, exported
from deepspeed.launcher.guard import Requests
from deepspeed.launcher.hostfile import Slot, encode_world_info
from deepspeed.launcher.leftovers import removing
from deepspeed.launcher.link.front import FrontEnd
from deepspeed.launcher.pidfile import pid_file, pid_path
from deepspeed.launcher.ports import hold_port
from deepspeed.launcher.probe import Probe, addresses_of, choose_address, choose_port, is_this_machine, probe
from deepspeed.launcher.processes import adopting_orphans, start_process
from deepspeed.launcher.seat import TOKEN_NAME

__all__ = ["Meeting", "find_meeting", "make_job", "run"]

logger = get_logger("deepspeed.launcher.runner")  # the name under which users know these messages

Selection = Mapping[str, Sequence[Slot]]


class Meeting(NamedTuple):
    """Where the ranks of a job meet."""

    address: str
    port: int


class InstalledPrograms:
    """The programs of this machine: on PATH, of the Intel MPI that I_MPI_ROOT names, and beside the interpreter."""

    def named(self, name: str) -> list[str]:
        """See `backends.Programs`."""
        folders = os.environ.get("PATH", "").split(os.pathsep)
        folders += [f"{os.environ['I_MPI_ROOT']}/bin"] if "I_MPI_ROOT" in os.environ else []
        folders.append(str(Path(sys.executable).parent))
        found = (shutil.which(name, path=folder) for folder in folders if folder)
        return list(dict.fromkeys(path for path in found if path is not None))

    def says(self, *argv: str) -> str:
        """See `backends.Programs`."""
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout + done.stderr


def find_meeting(args: argparse.Namespace, selection: Selection, leases: contextlib.ExitStack | None = None) -> Meeting:
    """Choose address and port, by asking the first host where that is possible.

    Args:
        args: what `parse_runner_args` returned.
        selection: the hosts and slots, in the order of ranks.
        leases: keeps a port that was chosen from other jobs which this machine starts meanwhile.

    Raises:
        LaunchError: ssh does not get there, or the port is in use there.
    """
    host = next(iter(selection))
    by_ssh = args.launcher == "pdsh" or not is_this_machine(host)
    if by_ssh and (args.no_ssh_check or args.launcher == "slurm"):  # whose clusters often let nobody in by ssh
        found = Probe((), frozenset())
    else:
        found = probe(host, args.hostfile, by_ssh=by_ssh, ssh_port=args.ssh_port)
    address = args.master_addr or choose_address(found.addresses, addresses_of(host), host)

    def take(port: int) -> bool:
        lease = hold_port(port) if leases is not None else None
        if leases is not None and lease is not None:
            leases.enter_context(lease)
        return leases is None or lease is not None

    return Meeting(address, choose_port(args.master_port, found.used_ports, host, take))


def make_job(
    args: argparse.Namespace,
    selection: Selection,
    words: LaunchWords,
    environ: Mapping[str, str],
    from_files: Mapping[str, str],
    scratch: Path,
) -> Job:
    """What a back end must know.

    Args:
        args: what `parse_runner_args` returned.
        selection: the hosts and slots to start on.
        words: the command of a member.
        environ: the variables of this process with those of the files.
        from_files: those of the files alone.
        scratch: see `Job`.

    Raises:
        LaunchError: `--launcher_args` cannot be taken apart.
    """
    folder = str(Path.cwd())
    accelerator = likely_accelerator(environ)
    # A front end without devices may start a job on hosts that have them.
    prefixes = (*EXPORTED_PREFIXES["cuda"], *EXPORTED_PREFIXES.get(accelerator, ()))
    return Job(
        hosts=selection,
        launcher=words.launcher,
        flags=words.flags,
        script=words.script,
        exports=exported(environ, from_files, prefixes, folder),
        environ=environ,
        folder=folder,
        scratch=scratch,
        launcher_args=_words_of(args.launcher_args),
        ssh_port=args.ssh_port,
        venv_script=str(Path(args.venv_script).expanduser().absolute()) if args.venv_script else None,
        comment=args.comment,
        devices_per_host=args.num_gpus if args.num_gpus > 0 and environ.get("DS_ACCELERATOR") != "cpu" else None,
        accelerator=accelerator,
        interfaces=frozenset(name for _, name in socket.if_nameindex()),
        is_root=os.geteuid() == 0,
        # Each name is looked up for it, which takes its time in a job of a thousand hosts.
        own_names=frozenset(filter(is_this_machine, selection)) if args.launcher == "openmpi" else frozenset(),
        own_name=socket.gethostname(),
    )


def _words_of(launcher_args: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(launcher_args))
    except ValueError as error:
        raise LaunchError(
            f"--launcher_args {launcher_args!r}: {error}. Quote its words as for a shell, for example "
            "--launcher_args=\"-p gpu --comment 'my job'\"."
        ) from None


def _start(command: Command, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start what starts the members of a job.

    Args:
        command: made by a back end.
        environ: variables of the command line's user, with those of files.

    Raises:
        LaunchError: the system refuses it.
    """
    mine = {name: value for name, value in environ.items() if name not in excluded(environ)}
    logger.debug("cmd = %s", command.argv)
    try:
        return start_process(command.argv, mine | command.environ, signal.SIGTERM)
    except OSError as error:
        longest = max(map(len, map(os.fsencode, command.argv)))
        raise LaunchError(
            f"{command.argv[0]} cannot be started: {error.strerror} ({len(command.argv)} words, the longest of {longest} "
            "bytes). Where it is too long: fewer variables or shorter values in .deepspeed_env, or an MPI as --launcher."
        ) from error


def run(args: argparse.Namespace, selection: Selection, environ: Mapping[str, str], from_files: Mapping[str, str]) -> int:
    """Run the job to its end and return its exit status.

    Args:
        args: what `parse_runner_args` returned.
        selection: the hosts and slots, in the order of ranks.
        environ: the variables of this process with those of the files.
        from_files: those of the files alone.

    Raises:
        LaunchError: it cannot be started as asked.
    """
    back_end = BACK_ENDS[args.launcher]
    program = back_end.find(InstalledPrograms())
    with contextlib.ExitStack() as closing:
        meeting = find_meeting(args, selection, closing)
        logger.info(
            "world size %d on %s, meeting at %s:%d, started by %s",
            sum(map(len, selection.values())),
            ", ".join(selection),
            *meeting,
            back_end.name,
        )
        token, world_info = secrets.token_hex(16), encode_world_info(selection)
        environ = {**environ, TOKEN_NAME: token}
        words = launch_words(args, world_info, *meeting, front_end=True)
        front_end = FrontEnd(*meeting, world_info, token, has_session_per_host=back_end.name == "pdsh")
        scratch = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="deepspeed-job-")))
        pid = os.getpid() if args.save_pid else 0
        closing.enter_context(pid_file(pid))
        closing.enter_context(removing(scratch, *([pid_path(pid)] if pid else [])))
        command = back_end.command(make_job(args, selection, words, environ, from_files, scratch), program)
        return _run_command(command, environ, front_end)


def _run_command(command: Command, environ: Mapping[str, str], front_end: FrontEnd) -> int:
    for path, text in command.files.items():
        path.write_text(text, encoding="utf-8")
    with adopting_orphans(), Requests() as requests:
        requests.pass_on_to(front_end.stop)
        return front_end.attend(_start(command, environ))
