"""Ask every host the same questions at once, over ssh, and hear what time it is there.

    this process --ssh, one thread per host--> python on the host: ping, pong, pong ... (its clock), then one JSON object

Lives here: the asking. Does not live here: the questions and what follows from the answers (`launcher.check`,
`env_report`'s `--all-hosts`, which call this), the start of jobs (`runner`).

[Note: clocks] The host answers each of five empty lines with its time. The quickest exchange counts: what its clock says,
less the middle of the exchange here, is known to half of the exchange's length.

[Note: greetings] A host may print what it likes before ours (an `echo` in ~/.bashrc). So its times carry a mark, and the
facts are the last line.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Answer", "remote_command", "survey"]

_EXCHANGES = 5
_CONNECT_SECONDS = 10
_LIMIT_SECONDS = 60.0
_AT_ONCE = 64
_MARK = "deepspeed-clock "

_BOOTSTRAP = """
import sys, time
for _ in range({exchanges}):
    sys.stdin.readline()
    print({mark!r} + repr(time.time()), flush=True)
{questions}
"""


@dataclass(frozen=True)
class Answer:
    """What came of one host: the facts, or why there are none."""

    host: str
    facts: dict[str, Any] = field(default_factory=dict)
    skew_seconds: float = 0.0
    """How far its clock is ahead of ours."""
    skew_error_seconds: float = 0.0
    status: int = 0
    """Exit status of ssh: 255 when it did not get there, 127 when the host has no such interpreter."""
    trouble: str = ""
    """Why there are no facts, in the words of ssh or of the host; empty otherwise."""


def remote_command(questions: str, folder: str, python: str = sys.executable) -> str:
    """The shell command that asks `questions` (Python, which prints one line of JSON) the way a job would be started.

    Args:
        questions: source text; it runs in `folder` where there is such a folder, with it on PYTHONPATH.
        folder: the working directory of the job.
        python: the interpreter.
    """
    source = _BOOTSTRAP.format(exchanges=_EXCHANGES, mark=_MARK, questions=questions)
    packed = base64.b64encode(source.encode()).decode()
    where = shlex.quote(folder)
    start = f"import base64; exec(base64.b64decode('{packed}'))"
    return (
        f'cd {where} 2> /dev/null; PYTHONPATH={where}"${{PYTHONPATH:+:$PYTHONPATH}}" '
        f"exec {shlex.quote(python)} -c {shlex.quote(start)}"
    )


def survey(hosts: Sequence[str], questions: str, *, ssh_port: int | None = None, folder: str = "") -> list[Answer]:
    """Ask all `hosts` at once; their answers, in order. Blocks at most a minute.

    Args:
        hosts: as ssh knows them; "localhost" is asked without ssh.
        questions: see `remote_command`.
        ssh_port: of their sshd; None means ssh's own choice.
        folder: of the job; empty means the working directory.
    """
    command = remote_command(questions, folder or str(Path.cwd()))
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}"]
    options += [] if ssh_port is None else ["-p", str(ssh_port)]

    def ask(host: str) -> Answer:
        return _ask(host, ["sh", "-c", command] if host == "localhost" else ["ssh", *options, host, command])

    with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(hosts)))) as pool:
        return list(pool.map(ask, hosts))


def _ask(host: str, argv: Sequence[str]) -> Answer:
    with tempfile.TemporaryFile("w+", errors="replace") as told:  # a pipe could fill up while the other one is read
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=told, text=True, errors="replace"
            )
        except FileNotFoundError:
            return Answer(host, status=127, trouble="there is no ssh on this machine: apt-get install openssh-client")
        limit = threading.Timer(_LIMIT_SECONDS, process.kill)
        limit.start()
        try:
            exchanges, output = _conversation(process)
        finally:
            limit.cancel()
        told.seek(0)
        why = told.read().strip().splitlines()
    lines = output.strip().splitlines()
    if process.returncode or not exchanges or not lines:
        silence = "no answer within a minute" if process.returncode == -9 else f"exit status {process.returncode}"
        return Answer(host, status=process.returncode or 1, trouble=why[-1] if why else silence)
    length, skew = min(exchanges)
    try:
        return Answer(host, json.loads(lines[-1]), skew, length / 2)
    except ValueError:
        return Answer(host, status=1, trouble=f"no facts came, but {lines[-1][:80]!r}")


def _conversation(process: subprocess.Popen[str]) -> tuple[list[tuple[float, float]], str]:
    """The exchanges, none where it ended before them, and what it says after them. Waits for its end.

    All its output is read through one buffer: `communicate` would miss what came together with a line read before.
    """
    assert process.stdin is not None  # pipes, as asked for
    assert process.stdout is not None
    with process.stdout:
        try:
            exchanges = [_exchange(process) for _ in range(_EXCHANGES)]
        except (OSError, ValueError):  # it ended before it answered
            exchanges = []
        with contextlib.suppress(OSError):  # what was not sent has nobody to read it
            process.stdin.close()
        output = process.stdout.read()
    process.wait()
    return exchanges, output


def _exchange(process: subprocess.Popen[str]) -> tuple[float, float]:
    """(how long one exchange took, how far the host's clock is ahead), in seconds. [Note: greetings]

    Raises:
        OSError, ValueError: the host has ended.
    """
    assert process.stdin is not None  # pipes, as asked for
    assert process.stdout is not None
    began, sent = time.monotonic(), time.time()
    process.stdin.write("\n")
    process.stdin.flush()
    while not (line := process.stdout.readline()).startswith(_MARK):
        if not line:
            raise ValueError("no time came")
    theirs = float(line.removeprefix(_MARK))
    length = time.monotonic() - began
    return length, theirs - (sent + length / 2)
