"""pdsh: one ssh per host, each starting one member that holds the ranks of its host. The default.

What travels is text for a shell, in which pdsh itself replaces `%n`, `%h` and `%u`. So every word is quoted, and its percent
signs are doubled; only the `%n` of `--node_rank=%n` is left for pdsh, which puts the host's number there.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from deepspeed.launcher.backends.job import Command, Job, Programs, not_installed

__all__ = ["PDSH", "exports_text", "shell_word"]

_FAN_OUT = 1024
"""Hosts that pdsh reaches at once, at least; fewer than a job has would leave the others waiting for ever."""


def shell_word(word: str) -> str:
    """`word` as a shell on the other side of pdsh reads it back."""
    return shlex.quote(word).replace("%", "%%")


def exports_text(exports: Mapping[str, str]) -> str:
    """The shell text that sets `exports`, in the order of their names."""
    return "".join(f"export {name}={shell_word(value)}; " for name, value in sorted(exports.items()))


class PDSH:
    """See the module."""

    name = "pdsh"
    place = ("--node_rank=%n",)

    def find(self, programs: Programs) -> str:
        """See `BackEnd`."""
        if not programs.named("pdsh"):
            raise not_installed(self.name, "there is no pdsh on PATH", "Install it, for example: apt-get install pdsh.")
        return "pdsh"

    def command(self, job: Job, program: str) -> Command:
        """See `BackEnd`."""
        words = [*map(shell_word, job.launcher), *(job.place or self.place), *map(shell_word, job.tail())]
        venv = [f". {shell_word(job.venv_script)} &&"] if job.venv_script else []
        argv = [
            *(program, "-S", "-f", str(max(_FAN_OUT, len(job.hosts))), "-w", ",".join(job.hosts)),
            *job.launcher_args,
            *venv,
            exports_text(job.exports),
            f"cd {shell_word(job.folder)} && exec",  # exec: the shell's own command line, with the values, goes
            *words,
        ]
        return Command(argv, {"PDSH_RCMD_TYPE": "ssh", **job.with_ssh_port("PDSH_SSH_ARGS_APPEND")})
