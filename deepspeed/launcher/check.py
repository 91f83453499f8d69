"""`deepspeed --check ...`: would this job start? Every host is asked, and what is wrong comes with what to do.

    selection --survey--> an answer per host --judge--> a table, a list of cures, exit status 1 when something is wrong

Lives here: the questions and the judgement. Does not live here: ssh (`launcher.survey`), which hosts there are (`runner`).
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from deepspeed.launcher.arguments import parse_runner_args
from deepspeed.launcher.ports import DEFAULT_PORT
from deepspeed.launcher.survey import Answer, survey

__all__ = ["Expected", "Finding", "check", "expected_here", "judge", "main", "questions"]

_PACKAGES = ("torch", "deepspeed")
_MOST_SKEW_SECONDS = 1.0
_COLUMNS = ("ssh", "python", *_PACKAGES, "folder", "port", "clock")

_QUESTIONS = """
import importlib.metadata, json, os, platform, socket
found = {{"python": platform.python_version()}}
for name in {packages!r}:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = ""
found["folder"] = os.path.isdir({folder!r})
found["token"] = os.path.exists(os.path.join({folder!r}, {token!r}))
found["port"] = ""
with socket.socket() as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind(("", {port}))
    except OSError as error:
        found["port"] = error.strerror
print(json.dumps(found))
"""


class Expected(NamedTuple):
    """What every host must have, as it is on this machine, and where the ranks will meet."""

    python: str
    packages: dict[str, str]
    folder: str
    token: str
    """A file just made in the folder; empty when none could be."""
    port: int


class Finding(NamedTuple):
    """One cell of the table: what was found; a cure when it is wrong."""

    text: str
    cure: str = ""


def questions(expected: Expected) -> str:
    """What each host is asked, for `survey`."""
    return _QUESTIONS.format(packages=_PACKAGES, folder=expected.folder, token=expected.token, port=expected.port)


def judge(answer: Answer, expected: Expected, *, is_first: bool) -> dict[str, Finding]:
    """What is to be said of a host, by column.

    Args:
        answer: of the host.
        expected: what it must have.
        is_first: whether the ranks will meet there, so that its port counts.
    """
    host, python = answer.host, sys.executable
    if answer.trouble:
        if answer.status == 127:
            return {"ssh": Finding("ok"), "python": Finding("absent", f"{host} has no {python}: install the same there")}
        cure = f"{host}: make `ssh {host} true` work without a password ({answer.trouble})"
        return {"ssh": Finding("unreachable" if answer.status == 255 else "failed", cure)}
    facts = answer.facts
    found = {"ssh": Finding("ok"), "python": _version(host, "Python", facts["python"], expected.python)}
    for name in _PACKAGES:
        found[name] = _version(host, name, facts[name], expected.packages[name])
    found["folder"] = _folder(host, bool(facts["folder"]), bool(facts["token"]), expected)
    if is_first and facts["port"]:
        cure = f"port {expected.port} on {host}: {facts['port']}. Give another --master_port"
        found["port"] = Finding("in use", cure)
    else:
        found["port"] = Finding("free" if is_first else "-")
    found["clock"] = _clock(answer)
    return found


def _version(host: str, name: str, theirs: str, ours: str) -> Finding:
    if theirs == ours:
        return Finding(theirs)
    if not theirs:
        return Finding("absent", f"{host} has no {name}: install {name} {ours} for {sys.executable} there")
    return Finding(theirs, f"{host} has {name} {theirs}, this machine {ours}: install the same on both")


def _folder(host: str, is_there: bool, has_token: bool, expected: Expected) -> Finding:
    if not is_there:
        return Finding(
            "absent", f"{host} has no {expected.folder}: start from a folder that all hosts share, or copy it there"
        )
    if expected.token and not has_token:
        return Finding(
            "own", f"{expected.folder} on {host} is not the one here: files written on one host are missed on others"
        )
    return Finding("shared" if expected.token else "there")


def _clock(answer: Answer) -> Finding:
    text = f"{answer.skew_seconds:+.3f} s"
    if abs(answer.skew_seconds) - answer.skew_error_seconds <= _MOST_SKEW_SECONDS:
        return Finding(text)
    return Finding(text, f"the clock of {answer.host} differs by {answer.skew_seconds:+.1f} s: run an NTP client on both")


def expected_here(folder: Path, token: str, port: int) -> Expected:
    """What this machine has."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = ""
    return Expected(platform.python_version(), packages, str(folder), token, port)


@contextlib.contextmanager
def _token(folder: Path) -> Iterator[str]:
    """The name of a file that lies in `folder` meanwhile; empty where none may be made."""
    name = f".deepspeed-check-{secrets.token_hex(8)}"
    try:
        (folder / name).touch()
    except OSError:
        yield ""
        return
    try:
        yield name
    finally:
        (folder / name).unlink(missing_ok=True)


def check(hosts: Sequence[str], port: int, ssh_port: int | None = None) -> int:
    """Ask all `hosts`, print the table and what to do, and return 1 when something is wrong, else 0.

    Args:
        hosts: of the job, the first one being where ranks meet.
        port: where they meet.
        ssh_port: of the hosts' sshd.
    """
    folder = Path.cwd()
    with _token(folder) as token:
        expected = expected_here(folder, token, port)
        answers = survey(hosts, questions(expected), ssh_port=ssh_port, folder=str(folder))
    findings = {each.host: judge(each, expected, is_first=each.host == hosts[0]) for each in answers}
    table = Table("host", *_COLUMNS, title=f"Can a job start? {len(hosts)} host(s), as seen from this machine")
    for host, found in findings.items():
        cells = (found.get(name, Finding("?")) for name in _COLUMNS)
        table.add_row(host, *(f"[red]{cell.text}[/]" if cell.cure else cell.text for cell in cells))
    console = Console()
    console.print(table)
    cures = [finding.cure for found in findings.values() for finding in found.values() if finding.cure]
    for cure in cures:
        console.print(f"- {cure}.", soft_wrap=True, markup=False, highlight=False)
    if not cures:
        console.print("All hosts are ready.")
    return 1 if cures else 0


def main(words: Sequence[str], hosts_of: Callable[[argparse.Namespace], list[str]]) -> int:
    """Run `deepspeed --check WORDS`; return the exit status.

    Args:
        words: the flags of a job; its script may be left out.
        hosts_of: the hosts that such a job would use, in order.

    Raises:
        LaunchError: the hostfile or a filter cannot be used.
    """
    args = parse_runner_args([*words, "no-script"])
    return check(hosts_of(args), args.master_port or DEFAULT_PORT, args.ssh_port)
