"""`ds_report`: what this installation can do on this machine, for a person or as JSON for a program.

`gather` collects plain values; the other functions show them. Nothing is changed and nothing compiled.

Does not live here: what serves an operator (`ops.op_builder`). Called as the commands `ds_report` and `dsr`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.common.logging import get_logger
from deepspeed.errors import DeepSpeedError
from deepspeed.launcher.arguments import DLTS_HOSTFILE
from deepspeed.launcher.differences import difference_lines
from deepspeed.launcher.hostfile import fetch_hostfile
from deepspeed.launcher.survey import survey
from deepspeed.ops.native import ABI_VERSION, absence, build_record, library
from deepspeed.ops.op_builder import ALL_OPS
from deepspeed.version import git_branch, git_hash, version

__all__ = ["Fact", "OpState", "Report", "as_json", "cli_main", "gather", "main", "report_lines"]

logger = get_logger(__name__)

_QUESTIONS = """
import json, os
from deepspeed.env_report import as_json, gather
from deepspeed.launcher.differences import told_variables
print(json.dumps({**json.loads(as_json(gather())), "variable": told_variables(os.environ)}))
"""
"""What each host is asked with --all-hosts."""

_ENOUGH_SHM_NBYTES = 512 * 2**20


class OpState(NamedTuple):
    """One operator."""

    name: str
    installed: bool
    """Whether what it was written for serves: native code, or torch's own kernels; not its slower twin."""
    compatible: bool
    """Whether it can be used at all."""
    reason: str
    state: str
    """"native", "twin", "torch" or "none" (`ops.op_builder.builder`)."""


class Fact(NamedTuple):
    """One fact about the installation or the machine."""

    key: str
    """Name in the JSON form."""
    title: str
    value: str


class Report(NamedTuple):
    """Everything `ds_report` tells."""

    ops: tuple[OpState, ...]
    facts: tuple[Fact, ...]
    warnings: tuple[str, ...]


def gather(shm: Path = Path("/dev/shm")) -> Report:
    """Look at this installation and this machine.

    Args:
        shm: folder of the shared memory.
    """
    ops = tuple(
        OpState(op.NAME, op.state() in ("native", "torch"), op.is_compatible(), op.reason(), op.state())
        for op in ALL_OPS.values()
    )
    accelerator = get_accelerator()
    shm_nbytes = shutil.disk_usage(shm).total if shm.is_dir() else None
    facts = [
        Fact("torch_path", "torch install path", str(Path(torch.__file__).parent)),
        Fact("torch_version", "torch version", torch.__version__),
        Fact("deepspeed_path", "deepspeed install path", str(Path(deepspeed.__file__).parent)),
        Fact("deepspeed_version", "deepspeed version", version),
        Fact("deepspeed_commit", "deepspeed commit", f"{git_hash}, branch {git_branch}"),
        Fact("python", "python", f"{platform.python_version()} ({sys.executable})"),
        Fact("accelerator", "accelerator", f"{accelerator.device_name()}, {accelerator.device_count()} device(s)"),
        Fact("backend", "communication backend", str(accelerator.communication_backend_name())),
        Fact("cpu", "processor", f"{platform.machine()}, {os.cpu_count()} threads, torch uses {torch.get_num_threads()}"),
        *_native(),
        *_toolkits(),
        Fact("shm", "shared memory (/dev/shm) size", "absent" if shm_nbytes is None else f"{shm_nbytes / 2**30:.2f} GB"),
    ]
    return Report(ops, tuple(facts), (*_native_warnings(ops), *_shm_warnings(shm_nbytes)))


def _native() -> list[Fact]:
    """The native library, or why there is none."""
    found = library()
    if found is None:
        return [Fact("native_path", "native library", "absent"), Fact("native_absence", "because", absence() or "")]
    return [
        Fact("native_path", "native library", str(found.path)),
        Fact("native_isa", "instruction set of its kernels", found.isa),
        Fact("native_compiler", "compiler of it", found.compiler),
        Fact("native_abi", "its interface", f"version {ABI_VERSION}, plain C, without torch"),
        Fact("native_operators", "operators in it", ", ".join(sorted(found.operators))),
    ]


def _native_warnings(ops: Sequence[OpState]) -> list[str]:
    """What twins cost, and what the installation left aside."""
    notes = list(build_record().notes)
    twins = [op.name for op in ops if op.state == "twin"]
    if not twins:
        return notes
    why = absence() or "the native library was built without them"
    lost = "; ".join(f"{op.NAME} takes about {op.TWIN_COST}" for op in ALL_OPS.values() if op.NAME in twins and op.TWIN_COST)
    text = (
        f"{', '.join(twins)} run on their torch twins, with the same results and slower: {why}. "
        f"{lost and lost + '. '}See docs/guide/native-library.md. "
        "To have the native library, unset DS_NATIVE, or install again where a C++ compiler is, with DS_BUILD_OPS=1."
    )
    return [*notes, text]


def _toolkits() -> list[Fact]:
    """The toolkits that torch was built with."""
    versions = {"cuda": torch.version.cuda, "hip": torch.version.hip, "xpu": torch.version.xpu}
    return [Fact(f"torch_{name}", f"torch {name} version", found) for name, found in versions.items() if found]


def _shm_warnings(shm_nbytes: int | None) -> list[str]:
    if shm_nbytes is None or shm_nbytes >= _ENOUGH_SHM_NBYTES:
        return []
    return [
        f"/dev/shm holds {shm_nbytes / 2**20:.0f} MB; NCCL and data loaders want 512 MB or more. "
        "In Docker start the container with --shm-size=1gb."
    ]


def report_lines(report: Report, *, with_ops: bool, with_warnings: bool) -> list[str]:
    """The report as plain lines, for a file or a pipe.

    Args:
        report: what to tell.
        with_ops: whether operators are listed.
        with_warnings: whether warnings are.
    """
    lines: list[str] = []
    if with_ops:
        lines.append(f"{'op name':<26} {'installed':<10} {'compatible':<10} what serves it")
        for op in report.ops:
            lines.append(f"{op.name:<26} {_installed(op):<10} {_compatible(op):<10} {op.reason}")
        lines.append("")
    lines.append("DeepSpeed general environment info:")
    width = max(len(fact.title) for fact in report.facts)
    lines += [f"{fact.title + ' ':.<{width + 4}} {fact.value}" for fact in report.facts]
    return lines + ([f"WARNING: {text}" for text in report.warnings] if with_warnings else [])


def _installed(op: OpState) -> str:
    return "[YES]" if op.installed else "[NO]"


def _compatible(op: OpState) -> str:
    return "[OKAY]" if op.compatible else "[NO]"


def _print_tables(report: Report, console: Console, *, with_ops: bool, with_warnings: bool) -> None:
    """The report in colours, for a terminal."""
    if with_ops:
        table = Table("op name", "installed", "compatible", "what serves it", title="DeepSpeed op report")
        for op in report.ops:
            colour = "green" if op.compatible else "yellow"
            table.add_row(op.name, *(f"[{colour}]\\{mark}" for mark in (_installed(op), _compatible(op))), op.reason)
        console.print(table)
    facts = Table("fact", "value", title="DeepSpeed general environment info")
    for fact in report.facts:
        facts.add_row(fact.title, fact.value)
    console.print(facts)
    for text in report.warnings if with_warnings else ():
        console.print(f"[yellow]WARNING: {text}")


def as_json(report: Report) -> str:
    """The report as a JSON object: `ops` by name, the facts by key, `warnings`."""
    ops = {op.name: {key: value for key, value in op._asdict().items() if key != "name"} for op in report.ops}
    facts = {fact.key: fact.value for fact in report.facts}
    return json.dumps({"ops": ops, **facts, "warnings": list(report.warnings)}, indent=2)


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False, as_json_text: bool = False) -> None:
    """Print the report.

    Args:
        hide_operator_status: leave the operators out.
        hide_errors_and_warnings: leave the warnings out.
        as_json_text: print one JSON object, with everything in it.
    """
    report, console = gather(), Console()
    if as_json_text:
        sys.stdout.write(as_json(report) + "\n")
        return
    with_ops, with_warnings = not hide_operator_status, not hide_errors_and_warnings
    if console.is_terminal:
        _print_tables(report, console, with_ops=with_ops, with_warnings=with_warnings)
    else:
        sys.stdout.write("\n".join(report_lines(report, with_ops=with_ops, with_warnings=with_warnings)) + "\n")


def report_all_hosts(hostfile: str, ssh_port: int | None = None) -> int:
    """Ask every host of `hostfile` for its report, print what differs between them, and return the exit status.

    Args:
        hostfile: its path.
        ssh_port: of the hosts' sshd.

    Returns:
        1 when a host did not answer or something differs, else 0.
    """
    pool = fetch_hostfile(hostfile)
    answers = survey(list(pool) if pool is not None else ["localhost"], _QUESTIONS, ssh_port=ssh_port)
    lines = difference_lines(answers)
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if any(line.startswith("- ") for line in lines) else 0


def cli_main(args: Sequence[str] | None = None) -> None:
    """Read the command line `args` (None: that of this process) and print the report."""
    parser = argparse.ArgumentParser(prog="ds_report", description="Show what DeepSpeed can do on this machine.")
    parser.add_argument("--hide_operator_status", action="store_true", help="leave out the table of operators")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help="leave out warnings")
    parser.add_argument("--json", action="store_true", help="print one JSON object with everything in it")
    parser.add_argument("--all-hosts", action="store_true", help="ask every host of the hostfile; show what differs")
    parser.add_argument("-H", "--hostfile", default=DLTS_HOSTFILE, help=f"hosts for --all-hosts ({DLTS_HOSTFILE})")
    parser.add_argument("--ssh_port", type=int, help="port of the hosts' sshd")
    given = parser.parse_args(args)
    if given.all_hosts:
        try:
            status = report_all_hosts(given.hostfile, given.ssh_port)
        except DeepSpeedError as error:
            logger.error("%s", error)
            status = 1
        sys.exit(status)
    main(given.hide_operator_status, given.hide_errors_and_warnings, given.json)


if __name__ == "__main__":
    cli_main()
