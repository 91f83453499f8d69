"""Run the clients' own DeepSpeed tests, from their source distributions, against the lists of those that pass.

    python tests/clients/suites/run.py                    every client
    python tests/clients/suites/run.py peft --update      one; puts what passes for the first time on its list

A list (`NAME-VERSION.txt`) may only grow: the exit status is 1 when a listed test does not pass. `--folder` keeps the
unpacked sources, so that the next run fetches nothing; `--python` runs the tests with another interpreter, which may have
another `deepspeed`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from deepspeed.launcher import processes

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import passes  # noqa: E402  # siblings of a script, not a package: clients have a package `tests` themselves
from clients import CLIENTS, Client, Script  # noqa: E402

_SECONDS = 170  # for one script, or to fetch; pytest runs of a client may take three times as long
_TO_END = 5.0  # seconds from SIGTERM to SIGKILL, and for the last output of what was ended


@dataclass(frozen=True)
class Place:
    """Where a client's tests run: its unpacked source, the packages they need, and the interpreter."""

    source: Path
    needs: Path
    python: str

    def environ(self, **more: str) -> dict[str, str]:
        """Offline, one thread, the client's source and what it needs in front."""
        folders = [self.source / "src", self.needs, HERE]
        ours = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "HF_HOME": str(self.needs / "hf"), "OMP_NUM_THREADS": "1"}
        path = os.pathsep.join([str(Path(self.python).parent), os.environ["PATH"]])
        return {**os.environ, **ours, "PATH": path, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", **more}


def main(argv: Sequence[str], clients: Sequence[Client] = CLIENTS, lists: Path = HERE) -> int:
    """Run, compare, report; 0 when every listed test passed."""
    args = _arguments(argv, clients)
    chosen = [client for client in clients if not args.clients or client.name in args.clients]
    with tempfile.TemporaryDirectory(prefix="client-suites-") as temporary:
        folder = Path(args.folder or temporary).resolve()
        return max(_one(client, args, folder, lists) for client in chosen)


def _arguments(argv: Sequence[str], clients: Sequence[Client]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Run the clients' own DeepSpeed tests against the lists of those that pass."
    )
    parser.add_argument(
        "clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(client.name for client in clients)}; all"
    )
    parser.add_argument("--update", action="store_true", help="put tests that pass for the first time on the list")
    parser.add_argument("--folder", help="keep the sources here, and use those that are here")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the clients and a deepspeed")
    args = parser.parse_args(argv)
    if unknown := set(args.clients) - {client.name for client in clients}:
        parser.error(f"no tests are known of {', '.join(sorted(unknown))}")
    return args


def _one(client: Client, args: argparse.Namespace, folder: Path, lists: Path) -> int:
    name = f"{client.name}-{version(client.name)}"
    place = Place(_unpacked(client, name, folder), _needed(client, folder, args.python), args.python)
    results = _run_pytest(client, place) | _run_scripts(client, place)
    verdict, file = passes.judge(passes.read(lists / f"{name}.txt"), results), lists / f"{name}.txt"
    for what, names in (("LOST", verdict.lost), ("new", verdict.new), ("fails, unlisted", verdict.failed)):
        for each in names:
            print(f"{client.name}: {what}: {each}")
    if args.update and verdict.new:
        passes.add(file, verdict.new)
    print(
        f"{name}: {sum(results.values())} of {len(results)} passed, {len(verdict.lost)} of the listed ones lost", flush=True
    )
    return 1 if verdict.lost else 0


def version(name: str) -> str:
    """The version of `constraints.txt`."""
    text = (HERE.parents[2] / "constraints.txt").read_text()
    found = re.search(rf"^{re.escape(name)}==([^\s;]+)\s*(?:;.*)?$", text, re.MULTILINE)
    if found is None:
        raise LookupError(f"constraints.txt does not pin {name}: add a line {name}==VERSION.")
    return found[1]


def _unpacked(client: Client, name: str, folder: Path) -> Path:
    """The client's source below `folder`, fetched where it is not there yet, with the files laid that it lacks."""
    source = folder / name
    if not source.exists():
        pinned = name.replace(f"{client.name}-", f"{client.name}==", 1)
        fetch = ["download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", str(folder)]
        succeed([sys.executable, "-m", "pip", *fetch, pinned])
        with tarfile.open(folder / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    for path, text in client.laid.items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(text)
    return source


def _needed(client: Client, folder: Path, python: str) -> Path:
    """Packages of the client's tests, in a folder of their own: the environment stays as it is."""
    needs = folder / f"{client.name}-needs"
    if client.needs and not needs.exists():
        install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(needs)]
        succeed([python, *install, *client.needs])
    needs.mkdir(parents=True, exist_ok=True)
    return needs


def _run_pytest(client: Client, place: Place) -> dict[str, bool]:
    """What pytest says of the client's tests; its own settings of pytest (coverage) are left out."""
    if not client.tests:
        return {}
    report = place.needs / "report"
    report.unlink(missing_ok=True)
    command = [place.python, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no_gpu", *client.tests]
    environ = place.environ(
        SUITE_REPORT=str(report), SUITE_WITHOUT_GPU=",".join(client.without_gpu), SUITE_CLIENT=client.name
    )
    status, _ = ended(command, client.seconds, cwd=place.source, env=environ)
    if status is None:
        print(f"{client.name}: pytest ran more than {client.seconds:g} s: its last tests did not run")
    lines = report.read_text().splitlines() if report.exists() else []
    if not lines:
        raise RuntimeError(f"pytest ran none of {client.name}'s tests and ended with status {status}: see its output above.")
    return {line.partition(" ")[2]: line.startswith("passed ") for line in lines}


def _run_scripts(client: Client, place: Place) -> dict[str, bool]:
    """Whether each script ended with status 0, one after the other, in one folder that has the stand-ins for the hub."""
    if not client.scripts:
        return {}
    work = place.needs / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    laid = "import hub, pathlib; hub.write(pathlib.Path('.'))"
    succeed([place.python, "-c", laid], cwd=work, env=place.environ())
    return {script.name: _succeeds(script, place, work) for script in client.scripts}


def _succeeds(script: Script, place: Place, work: Path) -> bool:
    launch = [place.python, "-m", "accelerate.commands.launch", "--num_machines", "1", "--num_processes", "2"]
    flags = [flag.format(client=place.source) for flag in script.launch]
    if "--mixed_precision" not in flags:
        flags += ["--mixed_precision", "no"]
    command = [*launch, "--main_process_port", "0", "--dynamo_backend", "no", *flags, str(HERE / "launched.py")]
    status, output = ended(
        [*command, str(place.source / script.path), *script.args],
        _SECONDS, cwd=work, env=place.environ(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if status is None:
        print(f"--- {script.name}: more than {_SECONDS} s\n{output[-6000:]}")
    elif status:
        print(f"--- {script.name} ended with status {status}\n{output[-6000:]}")
    return status == 0


def succeed(command: Sequence[str], seconds: float = _SECONDS, **settings: Any) -> None:
    """Run a command to its end.

    Raises:
        RuntimeError: its status is not 0, or `seconds` were not enough; the text has its last output.
    """
    status, output = ended(command, seconds, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **settings)
    if status != 0:
        how = f"ran more than {seconds:g} s" if status is None else f"ended with status {status}"
        raise RuntimeError(f"{' '.join(command)} {how}, where 0 was needed. Its last output:\n{output[-6000:]}")


def ended(command: Sequence[str], seconds: float, **settings: Any) -> tuple[int | None, str]:
    """The status of a command and what it wrote to `stdout`, if that is a pipe; None: `seconds` were not enough.

    Either way, and when it is interrupted, all that the command started has ended: ranks too, each of which leads a session
    of its own, so that no signal to their launcher or its group reaches them.

    Args:
        settings: of `subprocess.Popen`.
    """
    spared = {child.pid for child in psutil.Process().children()}
    with processes.adopting_orphans():
        started = subprocess.Popen(command, text=True, **settings)
        try:
            output, _ = started.communicate(timeout=seconds)
            return started.returncode, output or ""
        except subprocess.TimeoutExpired:
            processes.end_processes(spared, _TO_END)
            return None, _last_output(started)
        finally:
            processes.end_processes(spared, _TO_END)


def _last_output(process: subprocess.Popen[str]) -> str:
    """What an ended process wrote to its pipe. Another one may hold the pipe, out of our reach, so the wait has an end."""
    try:
        return process.communicate(timeout=_TO_END)[0] or ""
    except subprocess.TimeoutExpired as error:
        if process.stdout is not None:
            process.stdout.close()
        written = error.output or b""
        return written if isinstance(written, str) else written.decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
