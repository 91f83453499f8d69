"""Slurm: one member per rank, started by srun.

[Note: order] Slurm numbers tasks by its own order of hosts. A list with one host per rank and the distribution `arbitrary`
keep the order that was asked for, with any number of ranks on each host. `--nodelist` reads the list from a file.

[Note: at once] An srun that cannot be placed would wait for ever, unseen. `--immediate` ends that waiting; whoever wants to
queue says so: --launcher_args=--immediate=3600.
"""

from __future__ import annotations

from deepspeed.launcher.backends.job import BackEndError, Command, Job, Programs, not_installed

__all__ = ["Slurm"]

_PLACE = ("--from_scheduler=slurm",)
_PLACING_SECONDS = 10


class Slurm:
    """See the module."""

    name = "slurm"

    def find(self, programs: Programs) -> str:
        """See `BackEnd`."""
        if not all(programs.named(name) for name in ("sinfo", "srun")):
            raise not_installed(
                self.name,
                "there is no sinfo and srun on PATH",
                "Install them on this machine: apt-get install slurm-client.",
            )
        return "srun"

    def command(self, job: Job, program: str) -> Command:
        """See `BackEnd`."""
        for host, slots in job.hosts.items():
            if list(slots) != list(range(len(slots))):
                raise BackEndError(
                    f"launcher 'slurm' hands out devices itself, so the slots of {host} must be 0 to {len(slots) - 1}, "
                    f"not {', '.join(map(str, slots))}: choose their number (--num_gpus), not their indices."
                )
        hostfile = job.scratch / "hostfile"
        per_host = job.ranks_per_host
        has_patience = any(word.startswith(("--immediate", "-I")) for word in job.launcher_args)
        argv = [
            *(program, "-n", str(job.world_size)),
            *job.launcher_args,
            *(("--comment", job.comment) if job.comment else ()),
            *("--nodes", str(len(job.hosts))),
            *(("--ntasks-per-node", str(per_host)) if per_host else ()),
            *(("--gpus-per-node", str(job.devices_per_host)) if job.devices_per_host else ()),
            *("--nodelist", str(hostfile), "--distribution=arbitrary"),
            *(() if has_patience else (f"--immediate={_PLACING_SECONDS}",)),
            *("--kill-on-bad-exit=1", "--export=ALL"),  # values: from its environment
            *job.words(_PLACE),
        ]
        lines = "".join(f"{host}\n" for host, slots in job.hosts.items() for _ in slots)
        return Command(argv, dict(job.exports), {hostfile: lines})
