"""The command lines of the runner and of the per-host launcher, and the one that the first writes for the second.

Pure: argparse over lists of words. Everything after the script belongs to the script and arrives there unchanged.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from deepspeed.launcher.elastic_limits import elastic_words, range_after_flag
from deepspeed.launcher.ports import DEFAULT_PORT
from deepspeed.launcher.tracing import DEFAULT_FOLDER, steps_of

__all__ = [
    "DLTS_HOSTFILE",
    "LaunchWords",
    "launch_words",
    "packed",
    "parse_launch_args",
    "parse_runner_args",
    "parse_verify_args",
    "rank_argv",
]

DLTS_HOSTFILE = os.environ.get("DLTS_HOSTFILE", "/job/hostfile")
"""The hostfile that is read when none is given."""

_ABOUT_SCRIPT = "Everything after the script is passed to it unchanged. A lone -- may stand before the script."
_BACK_ENDS = ("pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm")
_LEVELS = ("debug", "info", "warning", "error", "critical")

# How a lone `--` travels through argparse, which would drop it among the script's own arguments.
_SEPARATOR = "\0--"
_PACKED = "--packed="


def parse_runner_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line of `deepspeed`; None means that of this process. Exits with status 2 when it is wrong."""
    description = "Start a training script on one or more hosts, one process per device."
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        description=description,
        epilog=f"{_ABOUT_SCRIPT} `deepspeed verify --help` tells how to compare ZeRO stages on a script, `deepspeed "
        "plan --help` what memory a run will take.",
    )
    return _parse_runner(parser, words)


def parse_verify_args(words: Sequence[str]) -> argparse.Namespace:
    """Read what follows `deepspeed verify`: flags of its own among those of `deepspeed`. Exits as above."""
    parser = argparse.ArgumentParser(
        prog="deepspeed verify",
        description="Run the first steps of a training script twice, at ZeRO stage 0 and as its config says, and compare "
        "the parameters. Exits with 0 when they agree, with 1 when they do not.",
        epilog=f"{_ABOUT_SCRIPT} The script must seed what is random in it.",
    )
    group = parser.add_argument_group("the comparison")
    group.add_argument("--steps", type=_positive, default=3, help="steps to run; default: 3")
    group.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        help="how far a parameter may be off, as part of the largest change it has made; default: 0.001",
    )
    group.add_argument("--keep", metavar="FOLDER", help="leave the recorded parameters there, as safetensors files")
    return _parse_runner(parser, words)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return number


def _parse_runner(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace:
    _add_resource_flags(parser.add_argument_group("which hosts and devices"))
    _add_host_flags(parser.add_argument_group("several hosts"))
    _add_rank_flags(parser.add_argument_group("how each rank runs"))
    job = parser.add_argument_group("the job")
    job.add_argument("--master_addr", default="", help="address where ranks meet; default: the first host, 127.0.0.1 on one")
    job.add_argument(
        "--master_port",
        type=int,
        help=f"port where ranks meet; default: {DEFAULT_PORT}, or the next free one on the first host when that is in use",
    )
    job.add_argument(
        "--save_pid",
        action="store_true",
        help="keep the launcher's process id in <temporary folder>/<process id of this command>.ds while the job runs",
    )
    job.add_argument(
        "--profile-steps",
        type=steps_of,
        metavar="FIRST-LAST",
        help="trace these steps with torch's profiler, counted from 1 as progress lines count them: a file per rank",
    )
    job.add_argument(
        "--profile-folder",
        default=DEFAULT_FOLDER,
        metavar="FOLDER",
        help=f"where traces go, on the host of each rank; default: {DEFAULT_FOLDER}",
    )
    job.add_argument("--autotuning", choices=("tune", "run"), default="", help="not built yet in this version")
    parser.add_argument("user_script", help="the script; with --module a module, with --no_python a command")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help="arguments of the script")
    given = list(sys.argv[1:] if words is None else words)
    args = _parse(parser, given, "user_script", "user_args")
    script_at = len(given) - len(args.user_args) - 1
    limits = range_after_flag(given, script_at)
    if limits is None:
        return args
    del given[script_at]
    args = _parse(parser, given, "user_script", "user_args")
    args.min_elastic_nodes, args.max_elastic_nodes = limits
    return args


def parse_launch_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line of `deepspeed.launcher.launch`; None means that of this process. Exits as above."""
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed.launcher.launch",
        description="Start and watch the ranks of one host. The deepspeed command calls this on each host.",
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--node_rank", type=int, default=0, help="number of this host in the job: start all its ranks")
    place.add_argument(
        "--from_scheduler",
        choices=("openmpi", "pmi", "slurm"),
        help="start the one rank that this scheduler's variables say",
    )
    parser.add_argument("--front_end", action="store_true", help="a command on another host started this and joins the link")
    parser.add_argument("--master_addr", default="127.0.0.1", help="address of the host of rank 0")
    parser.add_argument("--master_port", type=int, default=DEFAULT_PORT, help="port on which rank 0 listens")
    parser.add_argument("--world_info", default="None", help="base64 of JSON: slots of each host, in rank order")
    parser.add_argument("--save_pid", type=int, default=0, help="process id that names the file for ours; 0: no file")
    parser.add_argument("--enable_elastic_training", action="store_true", help="start ranks anew when hosts come or go")
    _add_elastic_limits(parser)
    _add_rank_flags(parser)
    parser.add_argument("training_script", help="the script; with --module a module, with --no_python a command")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="arguments of the script")
    return _parse(parser, _unpacked(sys.argv[1:] if words is None else words), "training_script", "training_script_args")


def packed(script: Sequence[str]) -> str:
    """One word for `script` that every back end carries as it is; `parse_launch_args` takes it apart."""
    return _PACKED + base64.urlsafe_b64encode(json.dumps(list(script)).encode()).decode()


def _unpacked(words: Sequence[str]) -> Sequence[str]:
    if not words or "--" in words or not words[-1].startswith(_PACKED):
        return words
    return [*words[:-1], "--", *json.loads(base64.urlsafe_b64decode(words[-1].removeprefix(_PACKED)))]


def _parse(parser: argparse.ArgumentParser, words: Sequence[str] | None, script: str, rest: str) -> argparse.Namespace:
    given = sys.argv[1:] if words is None else words
    args = parser.parse_args([_SEPARATOR if word == "--" else word for word in given])
    command = ["--" if word == _SEPARATOR else word for word in (getattr(args, script), *getattr(args, rest))]
    if command[0] == "--":
        del command[0]
    if not command:
        parser.error(f"the following arguments are required: {script}")
    setattr(args, script, command[0])
    setattr(args, rest, command[1:])
    return args


def _add_resource_flags(group: argparse._ActionsContainer) -> None:
    group.add_argument("-H", "--hostfile", default=DLTS_HOSTFILE, help=f"lines of HOST slots=N; default: {DLTS_HOSTFILE}")
    group.add_argument("-i", "--include", default="", help="use these only: HOST@HOST:SLOT,SLOT; no slots: the whole host")
    group.add_argument("-e", "--exclude", default="", help="use all but these; not together with --include")
    group.add_argument("--num_nodes", type=int, default=-1, help="use the first N hosts; default: all")
    group.add_argument(
        "--num_gpus",
        "--num_accelerators",
        type=int,
        default=-1,
        help="use slots 0 to N-1 of each host; default: all devices, and one rank on a machine that has only its CPU",
    )


def _add_host_flags(group: argparse._ActionsContainer) -> None:
    group.add_argument("--launcher", type=str.lower, choices=_BACK_ENDS, default="pdsh", help="what reaches other hosts")
    group.add_argument("--launcher_args", default="", help="further words for the launcher's own command")
    group.add_argument("--force_multi", action="store_true", help="use --launcher for one host too")
    group.add_argument("--no_ssh", action="store_true", help="start the ranks of this host only; needs --node_rank")
    group.add_argument("--node_rank", type=int, default=-1, help="number of this host, from 0; with --no_ssh")
    group.add_argument("--no_ssh_check", action="store_true", help="do not try ssh to the first host before the start")
    group.add_argument("--ssh_port", type=int, help="port of ssh and pdsh")
    group.add_argument("--venv_script", help="file that is sourced first on other hosts, with pdsh")
    group.add_argument("--comment", default="", help="comment of the job, with slurm")
    group.add_argument(
        "--elastic_training",
        action="store_true",
        help="go on with fewer or more hosts when they change; MIN:MAX behind it says how many",
    )
    _add_elastic_limits(group)


def _add_elastic_limits(group: argparse._ActionsContainer) -> None:
    group.add_argument("--min_elastic_nodes", type=int, default=-1, help="fewest hosts of an elastic job; default: 1")
    group.add_argument("--max_elastic_nodes", type=int, default=-1, help="most hosts of an elastic job; default: all")
    group.add_argument(
        "--max_restarts", type=int, default=3, help="failures in a row that ranks of an elastic job may have; default: 3"
    )


def _add_rank_flags(group: argparse._ActionsContainer) -> None:
    group.add_argument("--module", action="store_true", help="run the script as `python -m`")
    group.add_argument("--no_python", action="store_true", help="run the script itself, without python before it")
    group.add_argument("--no_local_rank", action="store_true", help="do not give the script --local_rank=N")
    group.add_argument(
        "--enable_each_rank_log",
        default="None",
        metavar="FOLDER",
        help="write the output of each rank to a file in FOLDER",
    )
    group.add_argument("--bind_cores_to_rank", action="store_true", help="divide the cores of a host among its ranks")
    group.add_argument("--bind_core_list", help="the cores to divide, such as 1,3-5,7; default: all physical ones")
    group.add_argument("--log_level", choices=_LEVELS, default="info", help="what the launcher itself logs; default: info")
    group.add_argument("-q", "--quiet", action="store_true", help="the same as --log_level error")


class LaunchWords(NamedTuple):
    """The command that starts the ranks of a host, in parts: between `launcher` and `flags` stands the host's number."""

    launcher: tuple[str, ...]
    flags: tuple[str, ...]
    script: tuple[str, ...]

    def argv(self, *place: str) -> list[str]:
        """The whole command."""
        return [*self.launcher, *place, *self.flags, "--", *self.script]


def launch_words(
    args: argparse.Namespace,
    world_info: str,
    master_addr: str,
    master_port: int,
    save_pid: int = 0,
    *,
    front_end: bool = False,
) -> LaunchWords:
    """The command that starts the ranks of one host.

    Args:
        args: what `parse_runner_args` returned.
        world_info: see `hostfile.encode_world_info`.
        master_addr: address where ranks meet.
        master_port: port where ranks meet.
        save_pid: see `parse_launch_args`.
        front_end: a back end starts it, and the command of the user will join its link.
    """
    flags = [f"--master_addr={master_addr}", f"--master_port={master_port}"]
    flags += ["--front_end"] if front_end else []
    flags += [f"--{flag}" for flag in ("no_python", "module", "no_local_rank") if getattr(args, flag)]
    flags += [f"--save_pid={save_pid}"] if save_pid else []
    flags += [f"--enable_each_rank_log={args.enable_each_rank_log}"]
    flags += ["--bind_cores_to_rank"] if args.bind_cores_to_rank else []
    flags += [f"--bind_core_list={args.bind_core_list}"] if args.bind_core_list else []
    flags += elastic_words(args)
    flags += ["--quiet"] if args.quiet else []
    flags += [f"--log_level={args.log_level}"]
    launcher = (sys.executable, "-u", *_safe_path(), "-m", "deepspeed.launcher.launch", f"--world_info={world_info}")
    return LaunchWords(launcher, tuple(flags), (args.user_script, *args.user_args))


def _safe_path() -> list[str]:
    """The flag that keeps a `tty.py` or `queue.py` of the user's working directory from standing in for Python's own.

    Not where this package itself comes from the working directory, and not before Python 3.11, which lacks the flag.
    """
    root = Path(__file__).parents[2]
    needs_folder = root == Path.cwd() and str(root) not in sys.path[1:]
    return ["-P"] if sys.version_info >= (3, 11) and not needs_folder else []


def rank_argv(args: argparse.Namespace, local_rank: int) -> list[str]:
    """The command of one rank, without the words that bind it to cores.

    Args:
        args: what `parse_launch_args` returned.
        local_rank: the rank among those of its host.
    """
    words = [] if args.no_python else [sys.executable, "-u", *(["-m"] if args.module else [])]
    place = [] if args.no_local_rank else [f"--local_rank={local_rank}"]
    return [*words, args.training_script, *place, *args.training_script_args]
