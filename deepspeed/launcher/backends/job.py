"""What a back end is given, and what it makes of it. Plain values: a back end reads no environment and starts nothing.

```
   Job: hosts, launcher words, variables  --->  BackEnd.command  --->  Command: argv, variables, files to write
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from deepspeed.errors import LaunchError
from deepspeed.launcher.arguments import packed
from deepspeed.launcher.hostfile import Slot

__all__ = ["BackEnd", "BackEndError", "Command", "Job", "Programs", "find_mpi", "not_installed"]


class BackEndError(LaunchError, RuntimeError):
    """The chosen back end is not installed, or cannot place the job as asked."""


@dataclass(frozen=True)
class Job:
    """A job on several hosts.

    The words that a back end starts are `launcher`, `place`, `flags`, `script`; `place` is what tells a member its number,
    for which a back end has its own words.
    """

    hosts: Mapping[str, Sequence[Slot]]
    """Slots of each host to start on, in the order of ranks."""
    launcher: tuple[str, ...]
    """The interpreter, our per-host launcher, and what stands before `place`."""
    flags: tuple[str, ...]
    """The launcher's other flags."""
    script: tuple[str, ...]
    """The script and its arguments."""
    exports: Mapping[str, str]
    """Variables that every rank must have."""
    environ: Mapping[str, str]
    """Variables of the front end, of which `exports` are a part."""
    folder: str
    """Working directory on every host."""
    scratch: Path
    """A folder of this job on this machine, for files that the back end needs."""
    place: tuple[str, ...] = ()
    """Words instead of the back end's own: for a command that starts one host."""
    launcher_args: tuple[str, ...] = ()
    """The user's words for the back end's own command."""
    ssh_port: int | None = None
    venv_script: str | None = None
    """File that a shell reads first on each host."""
    comment: str = ""
    devices_per_host: int | None = None
    """What the user asked for by number, where a scheduler hands out devices."""
    accelerator: str = "cpu"
    interfaces: frozenset[str] = frozenset()
    """Names of this machine's network interfaces."""
    is_root: bool = False
    own_names: frozenset[str] = frozenset()
    """Names in `hosts` that mean the machine of the command; told to a back end that must know."""
    own_name: str = ""
    """What that machine calls itself."""

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return sum(len(slots) for slots in self.hosts.values())

    @property
    def ranks_per_host(self) -> int | None:
        """The number of ranks on each host; None when hosts differ."""
        counts = {len(slots) for slots in self.hosts.values()}
        return counts.pop() if len(counts) == 1 else None

    def with_ssh_port(self, variable: str) -> dict[str, str]:
        """`variable`, which holds further words for ssh, with the port appended; nothing without a port."""
        if self.ssh_port is None:
            return {}
        return {variable: f"{self.environ.get(variable, '')} -p {self.ssh_port}".lstrip()}

    def tail(self) -> tuple[str, ...]:
        """`flags` and `script`; a lone `:`, which MPI and Slurm read as "the next program", makes one packed word of it."""
        if ":" in self.script:
            return (*self.flags, packed(self.script))
        return (*self.flags, "--", *self.script)

    def words(self, place: Sequence[str]) -> list[str]:
        """The words for a back end that carries each of them as it is, within the environment of `venv_script`."""
        words = [*self.launcher, *(self.place or place), *self.tail()]
        return ["sh", "-c", '. "$0" && exec "$@"', self.venv_script, *words] if self.venv_script else words


@dataclass(frozen=True)
class Command:
    """What starts the members of a job."""

    argv: list[str]
    environ: dict[str, str] = field(default_factory=dict)
    """Variables of the command itself, beside those of whoever starts it."""
    files: dict[Path, str] = field(default_factory=dict)
    """Files to write before."""


class Programs(Protocol):
    """The programs of this machine."""

    def named(self, name: str) -> list[str]:
        """The programs called `name`, in the order in which they are looked for."""

    def says(self, *argv: str) -> str:
        """What a command writes; empty when it cannot be run."""


class BackEnd(Protocol):
    """A way to start one member of a job per host, or one per rank."""

    name: str
    """As `--launcher` calls it."""

    def find(self, programs: Programs) -> str:
        """Where its program is.

        Raises:
            BackEndError: it is not installed.
        """

    def command(self, job: Job, program: str) -> Command:
        """The command that starts `job` by `program`.

        Raises:
            BackEndError: the back end cannot place the job so.
        """


def not_installed(name: str, what: str, cure: str) -> BackEndError:
    """The error of a back end without its program."""
    return BackEndError(f"launcher '{name}' not installed: {what}. {cure}")


def find_mpi(name: str, programs: Programs, names: Sequence[str], marks: Sequence[str], cure: str) -> str:
    """Where the first program is that says to be of the MPI `name`; several MPIs call theirs mpirun.

    Args:
        name: the back end.
        programs: those of this machine.
        names: what its program may be called.
        marks: texts of which one stands in what it says of its version.
        cure: how to install it.

    Raises:
        BackEndError: there is none.
    """
    found = [path for each in names for path in programs.named(each)]
    for path in found:
        version = programs.says(path, "--version")
        if any(mark in version for mark in marks):
            return path
    what = f"{found[0]} is of another MPI" if found else f"there is no {' and no '.join(names)} on PATH"
    raise not_installed(name, what, cure)
