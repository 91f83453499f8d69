"""MPICH, Intel MPI and MVAPICH: three relatives that start processes by hydra. One member per rank.

Hydra takes its whole environment along (`-genvall`), so no value stands in a command line that other users can read.
"""

from __future__ import annotations

from pathlib import Path

from deepspeed.launcher.backends.job import BackEndError, Command, Job, Programs, find_mpi, not_installed

__all__ = ["MPICH", "MVAPICH", "IntelMPI"]

_PLACE = ("--from_scheduler=pmi",)


class MPICH:
    """MPICH; hosts may differ in their number of ranks (`-hosts a:1,b:3`)."""

    name = "mpich"

    def find(self, programs: Programs) -> str:
        """See `BackEnd`."""
        names = ("mpirun", "mpirun.mpich", "mpiexec.hydra")
        return find_mpi(self.name, programs, names, ("HYDRA",), "Install it, for example: apt-get install mpich.")

    def command(self, job: Job, program: str) -> Command:
        """See `BackEnd`."""
        per_host = job.ranks_per_host
        hosts = ",".join(job.hosts if per_host else (f"{host}:{len(slots)}" for host, slots in job.hosts.items()))
        argv = [
            *(program, "-n", str(job.world_size)),
            *(("-ppn", str(per_host)) if per_host else ()),
            *job.launcher_args,
            *("-genvall", "-hosts", hosts),
            *job.words(_PLACE),
        ]
        return Command(argv, {**job.exports, **job.with_ssh_port("HYDRA_LAUNCHER_EXTRA_ARGS")})


class IntelMPI:
    """Intel MPI. Its own pinning is off: our launcher binds, where it is asked to.

    One section of the command per host where their numbers of ranks differ, else one for all. The ranks' numbers are not
    written into a section each, as a job of a thousand would not fit into a command line; members read them from PMI_RANK.
    """

    name = "impi"

    def find(self, programs: Programs) -> str:
        """See `BackEnd`."""
        names = ("mpiexec.hydra", "mpirun")  # its mpirun runs whichever mpiexec.hydra comes first
        cure = "Install it: pip install impi-rt, or source setvars.sh of oneAPI."
        return find_mpi(self.name, programs, names, ("Intel(R) MPI",), cure)

    def command(self, job: Job, program: str) -> Command:
        """See `BackEnd`."""
        per_host, words = job.ranks_per_host, job.words(_PLACE)
        head = [program, *(("-ppn", str(per_host)) if per_host else ()), *job.launcher_args, "-genvall"]
        if per_host:
            sections = ["-hosts", ",".join(job.hosts), "-n", str(job.world_size), *words]
        else:
            each = [["-n", str(len(slots)), "-host", host, *words] for host, slots in job.hosts.items()]
            sections = each[0] + [word for section in each[1:] for word in (":", *section)]
        environ = {**job.exports, "I_MPI_PIN": "0", **job.with_ssh_port("I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS")}
        root = Path(program).parent.parent  # of a wheel; setvars.sh sets it
        return Command(head + sections, {"I_MPI_ROOT": job.environ.get("I_MPI_ROOT", str(root)), **environ})


class MVAPICH:
    """MVAPICH. The variables are those the field starts it with; the command line is tested, the program is not."""

    name = "mvapich"

    _SETTINGS = ("MV2_SMP_USE_CMA=0", "MV2_DEBUG_SHOW_BACKTRACE=1")
    _CUDA_SETTINGS = ("MV2_USE_CUDA=1",)
    _FURTHER_SETTINGS = ("MV2_SUPPORT_DL=1", "MV2_ENABLE_AFFINITY=0", "MV2_INTER_ALLGATHER_TUNING=5", "MV2_CUDA_USE_NAIVE=0")

    def find(self, programs: Programs) -> str:
        """See `BackEnd`."""
        if not any("MVAPICH" in programs.says(path) for path in programs.named("mpiname")):
            what = "there is no mpiname of MVAPICH on PATH"
            raise not_installed(self.name, what, "Build it from https://mvapich.cse.ohio-state.edu and put it on PATH.")
        return "mpirun"

    def command(self, job: Job, program: str) -> Command:
        """See `BackEnd`."""
        per_host = job.ranks_per_host
        if per_host is None:
            told = ", ".join(f"{host} has {len(slots)}" for host, slots in job.hosts.items())
            raise BackEndError(
                f"launcher 'mvapich' needs as many slots on each host, but {told}: give --num_gpus, or choose by --include."
            )
        hostfile = job.scratch / "hostfile"
        settings = (*self._SETTINGS, *(self._CUDA_SETTINGS if job.accelerator == "cuda" else ()), *self._FURTHER_SETTINGS)
        argv = [
            *(program, "-np", str(job.world_size), "-ppn", str(per_host), "--hostfile", str(hostfile)),
            *job.launcher_args,
            *(word for setting in settings for word in ("-env", setting)),
            *("-genvall", *job.words(_PLACE)),
        ]
        return Command(argv, dict(job.exports), {hostfile: "".join(f"{host}\n" for host in job.hosts)})
