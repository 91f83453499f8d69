"""Variables that a job carries: the `.deepspeed_env` file, and the names that go to other machines.

Pure, but for `read_environment_files`. Values may be secrets: no error or log line here shows one.

[Note: order] The file is looked for in the home directory and in the working directory; both are read and the second wins.
The file wins over the environment of the command, on one machine as on many; the places of ranks win over the file.

Does not live here: the places of ranks (`placement`). `runner` calls it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from deepspeed.common.logging import get_logger
from deepspeed.errors import LaunchError
from deepspeed.launcher.text_files import read_text

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "EXPORT_ENVS",
    "EnvironmentFileError",
    "excluded",
    "exported",
    "parse_environment",
    "read_environment_files",
]

logger = get_logger("deepspeed.launcher.environment")

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
"""Name, or path, of the file of variables."""

EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]
"""Variables whose names start so travel to other machines. Clients append to this list before they start a job."""

_OURS = ("DS_", "DEEPSPEED_")
_STAYS_HERE = frozenset({"DS_ENV_FILE"})  # names a file of this machine, which has been read
_EXCLUDED_BY_AISC = frozenset({"NCCL_IB_HCA", "UCX_NET_DEVICES"})  # that platform sets them for each machine

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class EnvironmentFileError(LaunchError, ValueError):
    """A file of variables has a line that is not `NAME=VALUE`."""


def parse_environment(text: str, source: str = "environment file") -> dict[str, str]:
    """Read `NAME=VALUE` lines; blank lines and lines that start with `#` are skipped, `export ` in front is allowed.

    A value that starts with a quote is read as a shell reads it; any other is taken as it stands, blanks inside and `=`
    signs included.

    Args:
        text: the content of the file.
        source: name of the file, for error texts.

    Raises:
        EnvironmentFileError: for every bad line at once, by number; never with its content, which may be secret.
    """
    values: dict[str, str] = {}
    faults: list[str] = []
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.removeprefix("export ").lstrip().partition("=")
        if not equals or not _NAME.fullmatch(name):
            faults.append(f"line {number} is not NAME=VALUE (no blanks around '=')")
            continue
        try:
            values[name] = _unquoted(value)
        except ValueError:
            faults.append(f"line {number}: the quotes of {name} do not close, or text follows them")
    if faults:
        raise EnvironmentFileError(f"{source}: {'; '.join(faults)}. Write one NAME=VALUE per line; '#' starts a comment.")
    return values


def _unquoted(value: str) -> str:
    if not value.startswith(("'", '"')):
        return value
    (word,) = shlex.split(value)  # several words: ValueError, as for open quotes
    return word


def read_environment_files(name: str, folders: Iterable[Path], *, is_required: bool = False) -> dict[str, str]:
    """Read the file `name` in each of `folders` where it exists; later folders win. An absolute `name` is read once.

    Args:
        name: of the file.
        folders: where it is looked for.
        is_required: whether its absence deserves a warning, as the user named it.

    Raises:
        EnvironmentFileError: see `parse_environment`.
        LaunchError: see `read_text`.
    """
    values: dict[str, str] = {}
    is_there = False
    for path in dict.fromkeys(folder / name for folder in folders):
        text = read_text(path)
        if text is not None:
            is_there = True
            found = parse_environment(text, str(path))
            logger.info("%s sets %s", path, ", ".join(found) or "nothing")
            values |= found
    if is_required and not is_there:
        logger.warning("there is no file %s, which DS_ENV_FILE names: the job gets no variables from it.", name)
    return values


def exported(
    environ: Mapping[str, str], from_files: Mapping[str, str], accelerator_prefixes: Iterable[str], folder: str
) -> dict[str, str]:
    """The variables that a job takes to its other machines.

    Args:
        environ: the variables of the command.
        from_files: those of `read_environment_files`: all of them travel, and they win.
        accelerator_prefixes: families of the accelerator's libraries.
        folder: the working directory, which goes first in PYTHONPATH.

    Returns:
        The families of `EXPORT_ENVS`, of the accelerator and of this package, without what has to differ between machines
        and names that no shell can set (containers have some with dots).
    """
    families = (*EXPORT_ENVS, *accelerator_prefixes, *_OURS)
    names = (name for name in environ if name.startswith(families) and name not in _STAYS_HERE and _NAME.fullmatch(name))
    chosen = {name: environ[name] for name in names}
    chosen |= from_files
    path = chosen.get("PYTHONPATH")
    chosen["PYTHONPATH"] = f"{folder}{os.pathsep}{path}" if path else folder
    return {name: value for name, value in chosen.items() if name not in excluded(environ)}


def excluded(environ: Mapping[str, str]) -> frozenset[str]:
    """Names that must not reach other machines, as each has its own values."""
    return _EXCLUDED_BY_AISC if "AISC_JOB_NAME" in environ else frozenset()
