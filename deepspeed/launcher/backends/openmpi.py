"""Open MPI: one member per rank.

[Note: order] Given hosts with slots, its mapper begins with the machine that mpirun runs on, wherever the hostfile names it.
A file with one line per rank and `--map-by seq` keep the order of ranks that was asked for, with any number on each host.

[Note: own name] That mapper compares names, and mpirun knows its own machine by one alone: what that calls itself. In a
hostfile that calls it otherwise (an address, a name of another network) it would be "a node that is not in your allocation".

[Note: statuses] It would wait some 3 s for processes that it ends after one has failed: `launch`, [Note: patience].

[Note: binding] It would bind each rank to a core or a socket. Our launcher binds, where it is asked to.
"""

from __future__ import annotations

from deepspeed.launcher.backends.job import Command, Job, Programs, find_mpi

__all__ = ["OpenMPI"]

_PLACE = ("--from_scheduler=openmpi",)
_CURE = "Install it, for example: apt-get install openmpi-bin."


class OpenMPI:
    """See the module."""

    name = "openmpi"

    def find(self, programs: Programs) -> str:
        """See `BackEnd`."""
        return find_mpi(self.name, programs, ("mpirun", "mpirun.openmpi"), ("Open MPI", "OpenRTE"), _CURE)

    def command(self, job: Job, program: str) -> Command:
        """See `BackEnd`."""
        hostfile = job.scratch / "hostfile"
        names = {host: job.own_name if host in job.own_names else host for host in job.hosts}
        lines = "".join(f"{names[host]}\n" for host, slots in job.hosts.items() for _ in slots)
        # The documented pair keeps MPI off interfaces that other hosts do not reach. A name that is not there is an error.
        is_tcp_chosen = "btl_tcp_if_include" in job.launcher_args or "eth0" not in job.interfaces
        argv = [
            *(program, "-n", str(job.world_size), "-hostfile", str(hostfile), "--map-by", "seq"),
            *(() if "--bind-to" in job.launcher_args else ("--bind-to", "none")),
            *("--mca", "btl", "^openib"),
            *(() if is_tcp_chosen else ("--mca", "btl_tcp_if_include", "eth0")),
            *(() if job.ssh_port is None else ("--mca", "plm_rsh_args", f"-p {job.ssh_port}")),
            *job.launcher_args,
            *(word for name in sorted({"UCX_TLS", *job.exports}) for word in ("-x", name)),  # values: from its environment
            *job.words(_PLACE),
        ]
        environ = {"UCX_TLS": "tcp", **job.exports}
        if job.is_root:
            environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return Command(argv, environ, {hostfile: lines})
