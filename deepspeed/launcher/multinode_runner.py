"""The back ends as classes, by the names under which programs know them; `backends` does the work.

    runner = PDSHRunner(args, world_info_base64)      args: of `runner.parse_args`
    environment = os.environ.copy()
    if runner.backend_exists():
        subprocess.Popen(runner.get_cmd(environment, active_resources), env=environment)

`deepspeed` itself does not use them: it also watches the job.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path

from deepspeed.launcher.arguments import launch_words
from deepspeed.launcher.backends import BACK_ENDS, BackEndError
from deepspeed.launcher.far_hosts import InstalledPrograms, make_job
from deepspeed.launcher.hostfile import Slot, decode_world_info
from deepspeed.launcher.ports import DEFAULT_PORT

__all__ = [
    "IMPIRunner",
    "MPICHRunner",
    "MVAPICHRunner",
    "MultiNodeRunner",
    "OpenMPIRunner",
    "PDSHRunner",
    "SlurmRunner",
]


class MultiNodeRunner:
    """One back end with one job."""

    name: str
    """As `--launcher` calls it."""

    def __init__(
        self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, Sequence[Slot]] | None = None
    ) -> None:
        self.args = args
        self.user_script = args.user_script
        self.user_arguments = list(args.user_args)
        self.world_info_base64 = world_info_base64
        self.resource_pool = resource_pool
        self.exports: dict[str, str] = {}

    def backend_exists(self) -> bool:
        """Whether its program is installed on this machine."""
        try:
            BACK_ENDS[self.name].find(InstalledPrograms())
        except BackEndError:
            return False
        return True

    def add_export(self, key: str, var: str) -> None:
        """Let the variable `key` have the value `var` on every host."""
        self.exports[key.strip()] = var.strip()

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, Sequence[Slot]] | None = None
    ) -> list[str]:
        """The command that starts the job.

        Args:
            environment: what the command will run in; what it needs is added.
            active_resources: slots of each host; None means those of the world info.

        Raises:
            BackEndError: the back end is not installed, or cannot place the job.
        """
        back_end = BACK_ENDS[self.name]
        hosts = active_resources or decode_world_info(self.world_info_base64)
        address = self.args.master_addr or next(iter(hosts))
        words = launch_words(self.args, self.world_info_base64, address, self.args.master_port or DEFAULT_PORT)
        scratch = Path(tempfile.mkdtemp(prefix="deepspeed-job-"))  # read while the command runs, so it stays
        job = make_job(self.args, hosts, words, environment, self.exports, scratch)
        command = back_end.command(
            replace(job, script=(self.user_script, *self.user_arguments)), back_end.find(InstalledPrograms())
        )
        for path, text in command.files.items():
            path.write_text(text, encoding="utf-8")
        environment.update(command.environ)
        return command.argv


class PDSHRunner(MultiNodeRunner):
    """See `backends.pdsh`."""

    name = "pdsh"


class OpenMPIRunner(MultiNodeRunner):
    """See `backends.openmpi`."""

    name = "openmpi"


class MPICHRunner(MultiNodeRunner):
    """See `backends.hydra`."""

    name = "mpich"


class IMPIRunner(MultiNodeRunner):
    """See `backends.hydra`."""

    name = "impi"


class MVAPICHRunner(MultiNodeRunner):
    """See `backends.hydra`."""

    name = "mvapich"


class SlurmRunner(MultiNodeRunner):
    """See `backends.slurm`."""

    name = "slurm"
