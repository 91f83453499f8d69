"""The `deepspeed` command: decides what to start, starts it, and sees that nothing stays.

```
   arguments --> hostfile or this machine's devices --> filters and counts --> selection
             --> address and port --> the launcher of this host, with its environment --> its exit status
             --> other hosts: far_hosts
```

`deepspeed verify ...` starts two such jobs and compares them (`verify`); `deepspeed plan ...` (`planning`), `deepspeed
report ...` and `deepspeed top ...` (`run_report`) start none. A script of such a name is run as `./verify`.
`deepspeed --check ...` starts nothing: it asks every host whether the job would start (`check`).

A job that needs other hosts goes to `far_hosts` with its selection.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepspeed.common.logging import get_logger, set_log_level_from_string
from deepspeed.errors import DeepSpeedError, LaunchError
from deepspeed.launcher.arguments import DLTS_HOSTFILE, launch_words, parse_runner_args
from deepspeed.launcher.devices import count_devices, hides_all, parse_visible_devices, visible_devices_name
from deepspeed.launcher.elastic_limits import check_limits
from deepspeed.launcher.environment import DEEPSPEED_ENVIRONMENT_NAME, EXPORT_ENVS, read_environment_files
from deepspeed.launcher.guard import Requests, wait_guarded
from deepspeed.launcher.hostfile import (
    ResourceError,
    Slot,
    decode_world_info,
    encode_world_info,
    fetch_hostfile,
    parse_filter,
    parse_inclusion_exclusion,
    parse_resource_filter,
    select_first,
)
from deepspeed.launcher.pidfile import remove_stale
from deepspeed.launcher.ports import DEFAULT_PORT, PortLease, lease_port
from deepspeed.launcher.probe import is_this_machine
from deepspeed.launcher.processes import adopting_orphans, start_process
from deepspeed.launcher.tracing import VARIABLE, Tracing

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "DLTS_HOSTFILE",
    "EXPORT_ENVS",
    "decode_world_info",
    "encode_world_info",
    "fetch_hostfile",
    "main",
    "parse_args",
    "parse_inclusion_exclusion",
    "parse_resource_filter",
    "run",
    "select_resources",
]

logger = get_logger("deepspeed.launcher.runner")  # also when the module runs as __main__

parse_args = parse_runner_args

_COMMANDS = {
    "plan": "deepspeed.planning.command",
    "report": "deepspeed.run_report.command",
    "top": "deepspeed.run_report.top_command",
}
"""First words that start no job, and the module whose `main` takes the others."""

Selection = dict[str, list[Slot]]


def main(args: Sequence[str] | None = None) -> None:
    """Start a job and wait for its end; on success return, else exit with the status of the first rank that failed.

    Args:
        args: the words after `deepspeed`; None means those of this process, and errors are then printed instead of raised.

    Raises:
        LaunchError: the job cannot be started as asked (only with `args`).
    """
    words = sys.argv[1:] if args is None else args
    try:
        if words and words[0] == "verify":  # it loads torch, which starting a job does not
            status = importlib.import_module("deepspeed.launcher.verify").verify(words[1:], run)
        elif words and words[0] in _COMMANDS:  # they load what starting a job does without
            status = importlib.import_module(_COMMANDS[words[0]]).main(words[1:])
        elif words and words[0] == "--check":
            status = importlib.import_module("deepspeed.launcher.check").main(words[1:], _hosts)
        else:
            status = run(parse_args(words))
    except DeepSpeedError as error:
        if args is not None:
            raise
        logger.error("%s", error)
        status = 1
    if status:
        sys.exit(status)


def run(args: argparse.Namespace) -> int:
    """Start the job that `args` (of `parse_args`) describes, wait for its end and return its exit status.

    Raises:
        LaunchError: the job cannot be started as asked.
    """
    set_log_level_from_string("error" if args.quiet else args.log_level)
    pool = fetch_hostfile(args.hostfile, is_required=args.hostfile != DLTS_HOSTFILE)
    is_named = "DS_ENV_FILE" in os.environ
    from_files = read_environment_files(DEEPSPEED_ENVIRONMENT_NAME, (Path.home(), Path.cwd()), is_required=is_named)
    environ = {**os.environ, **from_files, **_tracing(args)}
    selection = select_resources(args, pool, environ)
    _refuse_unbuilt(args)
    _check_node_rank(args, list(selection))
    check_limits(args, len(selection))
    if _needs_back_end(args, selection):  # it loads the link, which a job on one machine has no use for
        module = "elastic_front" if args.elastic_training else "far_hosts"
        return int(importlib.import_module(f"deepspeed.launcher.{module}").run(args, selection, environ, from_files))
    master_addr = args.master_addr or "127.0.0.1"
    with _meeting_port(args, len(selection)) as lease:
        world_size = sum(len(slots) for slots in selection.values())
        logger.info("world size %d on %s, meeting at %s:%d", world_size, ", ".join(selection), master_addr, lease.port)
        save_pid = os.getpid() if args.save_pid else 0
        words = launch_words(args, encode_world_info(selection), master_addr, lease.port, save_pid)
        place = [f"--node_rank={args.node_rank}"] if args.no_ssh else []
        status = _run_launcher(words.argv(*place), environ)
    if save_pid:
        remove_stale(save_pid)
    return status


def _tracing(args: argparse.Namespace) -> dict[str, str]:
    """The variable that tells ranks what to trace."""
    if args.profile_steps is None:
        return {}
    first, last = args.profile_steps
    return {VARIABLE: Tracing(first, last, str(Path(args.profile_folder).absolute())).to_text()}


def _hosts(args: argparse.Namespace) -> list[str]:
    """The hosts that the job of `args` would use, in order."""
    pool = fetch_hostfile(args.hostfile, is_required=args.hostfile != DLTS_HOSTFILE)
    return list(select_resources(args, pool, os.environ))


def select_resources(args: argparse.Namespace, pool: Mapping[str, int] | None, environ: Mapping[str, str]) -> Selection:
    """Slots per host, in rank order, that the job uses.

    Args:
        args: what `parse_args` returned.
        pool: slots of each host of the hostfile; None means this machine alone.
        environ: where the visible-devices variable is read, without a hostfile.

    Raises:
        ResourceError: filters and counts exclude each other, name what is not there, or leave nothing.
    """
    num_nodes, num_gpus = (None if count == -1 else count for count in (args.num_nodes, args.num_gpus))
    if (args.include or args.exclude) and (num_nodes, num_gpus) != (None, None):
        raise ResourceError(
            "Cannot specify num_nodes/gpus with include/exclude: give --num_nodes and --num_gpus, or a filter, not both."
        )
    if pool is None:
        slots = _local_slots(args, environ)
    else:
        slots = parse_inclusion_exclusion(pool, args.include, args.exclude)
        _say_ignored(environ.get(visible_devices_name(environ)), "the hostfile says which slots there are")
    selection = select_first(slots, num_nodes, num_gpus)
    if not selection:
        raise ResourceError("no slot is left to run on: exclude less, or include more.")
    return selection


def _local_slots(args: argparse.Namespace, environ: Mapping[str, str]) -> Selection:
    """The slots of this machine that filters and the visible-devices variable leave."""
    visible = environ.get(visible_devices_name(environ))
    is_chosen = bool(args.include or args.exclude or args.num_gpus != -1 or args.num_nodes > 1)
    if visible is not None and not hides_all(visible):
        if not is_chosen:
            logger.info("Detected VISIBLE_DEVICES=%s: setting --include=localhost:%s", visible, visible)
            return {"localhost": parse_visible_devices(visible)}
        _say_ignored(visible, "the command line chooses devices")
    if args.num_gpus != -1:
        return {"localhost": []}  # `select_first` fills it: the count is the user's word
    count = count_devices(environ)
    if count == 0:
        raise ResourceError("this machine has no device to run on; DS_ACCELERATOR=cpu runs on the CPU.")
    if count is None:  # the CPU carries as many ranks as are named
        named = parse_filter(args.include, "--include").get("localhost") or [0]
        count = max(named) + 1
    return parse_inclusion_exclusion({"localhost": count}, args.include, args.exclude)


def _say_ignored(visible: str | None, why: str) -> None:
    if visible is not None and not hides_all(visible):
        logger.info("Detected VISIBLE_DEVICES=%s: ignored, as %s", visible, why)


def _refuse_unbuilt(args: argparse.Namespace) -> None:
    """Say which of the things asked for this version cannot do; the one list of them.

    Raises:
        LaunchError: there is such a thing.
    """
    for is_asked, flag, instead in ((args.autotuning, "autotuning", "set micro-batch and ZeRO stage by hand"),):
        if is_asked:
            raise LaunchError(f"--{flag} is not built yet in this version: {instead}.")


def _needs_back_end(args: argparse.Namespace, selection: Selection) -> bool:
    """Whether something must reach other hosts for this job."""
    if args.no_ssh:
        return False
    return args.force_multi or len(selection) > 1 or not all(map(is_this_machine, selection))


def _check_node_rank(args: argparse.Namespace, hosts: Sequence[str]) -> None:
    if not args.no_ssh:
        return
    if not 0 <= args.node_rank < len(hosts):
        raise ResourceError(f"--no_ssh with --node_rank {args.node_rank}: give 0 to {len(hosts) - 1}, another on each host.")
    if len(hosts) > 1 and not args.master_addr:
        raise ResourceError(
            f"--no_ssh on {len(hosts)} hosts needs --master_addr: the address of {hosts[0]}, the same everywhere."
        )


def _meeting_port(args: argparse.Namespace, hosts: int) -> PortLease:
    """The port of the job; on several hosts it must be the same everywhere, so it is never chosen here."""
    if hosts == 1:
        return lease_port(args.master_port)
    port = args.master_port or DEFAULT_PORT
    return lease_port(port) if args.node_rank == 0 else PortLease(port, None)


def _run_launcher(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run this host's launcher to its end, passing on requests to end; return its exit status."""
    logger.debug("cmd = %s", argv)
    with adopting_orphans(), Requests() as requests:
        launcher = start_process(argv, environ, signal.SIGTERM)
        requests.pass_on_to(launcher.send_signal)
        return wait_guarded(launcher)


if __name__ == "__main__":
    main()
