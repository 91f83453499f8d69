"""The command line of each back end, and which program runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from deepspeed.launcher.arguments import _BACK_ENDS
from deepspeed.launcher.backends import BACK_ENDS, BackEndError, Command, Job

LAUNCH = ("python", "-u", "-m", "deepspeed.launcher.launch", "--world_info=W")
FLAGS = ("--master_addr=10.0.0.1", "--master_port=29500")
SCRIPT = ("train.py", "--lr", "0.1", "--msg", "hello world")
JOB = Job(
    hosts={"worker-0": [0, 1], "worker-1": [0, 1]},
    launcher=LAUNCH,
    flags=FLAGS,
    script=SCRIPT,
    exports={"NCCL_DEBUG": "WARN", "PYTHONPATH": "/job", "UCX_NET": "a b", "DS_JOB_TOKEN": "secret"},
    environ={},
    folder="/my job",
    scratch=Path("/scratch"),
)
UNEQUAL = dataclasses.replace(JOB, hosts={"worker-1": [2], "worker-0": [0, 1, 3]})
BEHIND = [*FLAGS, "--", *SCRIPT]


def _command(name: str, job: Job = JOB, program: str = "program") -> Command:
    return BACK_ENDS[name].command(job, program)


def test_every_name_of_the_command_line_has_its_back_end() -> None:
    assert tuple(BACK_ENDS) == _BACK_ENDS


def test_pdsh_starts_one_member_per_host_by_text_for_a_shell() -> None:
    command = _command("pdsh")
    assert command.argv == [
        *("program", "-S", "-f", "1024", "-w", "worker-0,worker-1"),
        "export DS_JOB_TOKEN=secret; export NCCL_DEBUG=WARN; export PYTHONPATH=/job; export UCX_NET='a b'; ",
        "cd '/my job' && exec",
        *LAUNCH,
        "--node_rank=%n",
        *(*FLAGS, "--", "train.py", "--lr", "0.1", "--msg", "'hello world'"),
    ]
    assert command.environ == {"PDSH_RCMD_TYPE": "ssh"}


def test_pdsh_reads_the_file_of_the_environment_first_and_takes_a_port_and_further_words() -> None:
    job = dataclasses.replace(
        JOB, venv_script="/v e/activate", ssh_port=2222, launcher_args=("-u", "9"), environ={"PDSH_SSH_ARGS_APPEND": "-v"}
    )
    command = _command("pdsh", job)
    assert command.argv[5:10] == ["worker-0,worker-1", "-u", "9", ". '/v e/activate' &&", _command("pdsh").argv[6]]
    assert command.environ["PDSH_SSH_ARGS_APPEND"] == "-v -p 2222"


def test_pdsh_starts_one_host_of_a_job_under_its_own_number() -> None:
    job = dataclasses.replace(JOB, hosts={"worker-1": [0, 1]}, place=("--node_rank=1",))
    argv = _command("pdsh", job).argv
    assert argv[5] == "worker-1"
    assert "--node_rank=1" in argv
    assert "--node_rank=%n" not in argv


def test_open_mpi_keeps_the_order_of_ranks_and_takes_values_from_its_environment() -> None:
    command = _command("openmpi", dataclasses.replace(UNEQUAL, interfaces=frozenset({"lo", "eth0"})))
    assert command.argv == [
        *("program", "-n", "4", "-hostfile", "/scratch/hostfile", "--map-by", "seq", "--bind-to", "none"),
        *("--mca", "btl", "^openib", "--mca", "btl_tcp_if_include", "eth0"),
        *("-x", "DS_JOB_TOKEN", "-x", "NCCL_DEBUG", "-x", "PYTHONPATH", "-x", "UCX_NET", "-x", "UCX_TLS"),
        *(*LAUNCH, "--from_scheduler=openmpi", *BEHIND),
    ]
    assert command.files == {Path("/scratch/hostfile"): "worker-1\nworker-0\nworker-0\nworker-0\n"}
    assert command.environ == {"UCX_TLS": "tcp", **JOB.exports}


def test_open_mpi_is_settled_its_own_machine_by_the_name_that_it_knows() -> None:
    job = dataclasses.replace(JOB, own_names=frozenset({"worker-0"}), own_name="login")
    assert _command("openmpi", job).files == {Path("/scratch/hostfile"): "login\nlogin\nworker-1\nworker-1\n"}


def test_open_mpi_leaves_to_the_user_what_the_user_decides() -> None:
    words = ("--mca", "btl_tcp_if_include", "ib0", "--bind-to", "core")
    job = dataclasses.replace(
        JOB, launcher_args=words, interfaces=frozenset({"eth0"}), exports={"UCX_TLS": "rc"}, ssh_port=7, is_root=True
    )
    command = _command("openmpi", job)
    assert command.argv[7:15] == ["--mca", "btl", "^openib", "--mca", "plm_rsh_args", "-p 7", *words[:2]]
    assert (command.argv.count("--bind-to"), command.argv.count("btl_tcp_if_include")) == (1, 1)
    assert command.environ == {"UCX_TLS": "rc", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert "eth0" not in _command("openmpi").argv


def test_mpich_takes_hosts_with_as_many_ranks_or_with_their_numbers() -> None:
    argv = _command("mpich").argv
    assert argv == [
        *("program", "-n", "4", "-ppn", "2", "-genvall", "-hosts", "worker-0,worker-1"),
        *(*LAUNCH, "--from_scheduler=pmi", *BEHIND),
    ]
    assert _command("mpich", UNEQUAL).argv[:6] == ["program", "-n", "4", "-genvall", "-hosts", "worker-1:1,worker-0:3"]


def test_intel_mpi_gets_a_section_per_host_where_hosts_differ() -> None:
    words = [*LAUNCH, "--from_scheduler=pmi", *BEHIND]
    command = _command("impi", program="/opt/impi/bin/mpiexec.hydra")
    assert command.argv[1:] == ["-ppn", "2", "-genvall", "-hosts", "worker-0,worker-1", "-n", "4", *words]
    assert (command.environ["I_MPI_PIN"], command.environ["I_MPI_ROOT"]) == ("0", "/opt/impi")
    sections = ["-n", "1", "-host", "worker-1", *words, ":", "-n", "3", "-host", "worker-0", *words]
    assert _command("impi", UNEQUAL).argv == ["program", "-genvall", *sections]
    chosen = dataclasses.replace(JOB, environ={"I_MPI_ROOT": "/mine"}, ssh_port=22)
    environ = _command("impi", chosen).environ
    assert (environ["I_MPI_ROOT"], environ["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"]) == ("/mine", "-p 22")


def test_mvapich_gets_the_documented_variables() -> None:
    command = _command("mvapich", dataclasses.replace(JOB, accelerator="cuda"))
    settings = (
        *("MV2_SMP_USE_CMA=0", "MV2_DEBUG_SHOW_BACKTRACE=1", "MV2_USE_CUDA=1", "MV2_SUPPORT_DL=1"),
        *("MV2_ENABLE_AFFINITY=0", "MV2_INTER_ALLGATHER_TUNING=5", "MV2_CUDA_USE_NAIVE=0"),
    )
    assert command.argv == [
        *("program", "-np", "4", "-ppn", "2", "--hostfile", "/scratch/hostfile"),
        *(word for setting in settings for word in ("-env", setting)),
        *("-genvall", *LAUNCH, "--from_scheduler=pmi", *BEHIND),
    ]
    assert "MV2_USE_CUDA=1" not in _command("mvapich").argv
    with pytest.raises(BackEndError, match="worker-1 has 1, worker-0 has 3"):
        _command("mvapich", UNEQUAL)


def test_slurm_is_settled_hosts_order_and_to_fail_at_once() -> None:
    command = _command("slurm", dataclasses.replace(JOB, comment="my job", devices_per_host=2, launcher_args=("-p", "gpu")))
    assert command.argv == [
        *("program", "-n", "4", "-p", "gpu", "--comment", "my job", "--nodes", "2", "--ntasks-per-node", "2"),
        *("--gpus-per-node", "2", "--nodelist", "/scratch/hostfile", "--distribution=arbitrary"),
        *("--immediate=10", "--kill-on-bad-exit=1", "--export=ALL", *LAUNCH, "--from_scheduler=slurm", *BEHIND),
    ]
    assert command.files == {Path("/scratch/hostfile"): "worker-0\nworker-0\nworker-1\nworker-1\n"}
    patient = _command("slurm", dataclasses.replace(JOB, launcher_args=("--immediate=3600",))).argv
    assert [word for word in patient if word.startswith("--immediate")] == ["--immediate=3600"]


def test_slurm_hands_out_devices_itself_so_their_indices_cannot_be_chosen() -> None:
    with pytest.raises(BackEndError, match="slots of worker-1 must be 0 to 0, not 2"):
        _command("slurm", UNEQUAL)
    unequal = dataclasses.replace(JOB, hosts={"worker-1": [0], "worker-0": [0, 1, 2]})
    assert "--ntasks-per-node" not in _command("slurm", unequal).argv


@pytest.mark.parametrize("name", ["openmpi", "mpich", "impi", "mvapich", "slurm"])
def test_no_value_stands_in_a_command_line_that_other_users_can_read(name: str) -> None:
    command = _command(name)
    assert "secret" not in " ".join(command.argv)
    assert command.environ["DS_JOB_TOKEN"] == "secret"


@pytest.mark.parametrize("name", BACK_ENDS)
def test_a_lone_colon_which_means_the_next_program_to_them_travels_packed(name: str) -> None:
    argv = _command(name, dataclasses.replace(JOB, script=("train.py", ":", "x"))).argv
    assert ":" not in argv
    assert argv[-1].startswith("--packed=")


@pytest.mark.parametrize("name", ["openmpi", "mpich", "impi", "slurm"])
def test_the_environment_of_a_file_holds_for_members_of_every_back_end(name: str) -> None:
    argv = _command(name, dataclasses.replace(JOB, venv_script="/v/activate")).argv
    at = argv.index("sh")
    assert argv[at : at + 5] == ["sh", "-c", '. "$0" && exec "$@"', "/v/activate", "python"]


class Machine:
    """Programs that say what they are."""

    def __init__(self, programs: Mapping[str, str]) -> None:
        self._programs = programs

    def named(self, name: str) -> list[str]:
        return [path for path in self._programs if Path(path).name == name]

    def says(self, *argv: str) -> str:
        return self._programs[argv[0]]


OPEN, HYDRA, INTEL = "mpirun (Open MPI) 5.0.3", "HYDRA build details:", "Intel(R) MPI Library for Linux* OS"


@pytest.mark.parametrize(
    ("name", "programs", "found"),
    [
        ("pdsh", {"/bin/pdsh": ""}, "pdsh"),
        ("openmpi", {"/bin/mpirun": OPEN}, "/bin/mpirun"),
        ("openmpi", {"/bin/mpirun": HYDRA, "/bin/mpirun.openmpi": "(OpenRTE) 4.1.4"}, "/bin/mpirun.openmpi"),
        ("mpich", {"/bin/mpirun": OPEN, "/bin/mpirun.mpich": HYDRA}, "/bin/mpirun.mpich"),
        ("mpich", {"/opt/mpirun": INTEL, "/bin/mpiexec.hydra": HYDRA}, "/bin/mpiexec.hydra"),
        ("impi", {"/bin/mpiexec.hydra": HYDRA, "/venv/bin/mpiexec.hydra": INTEL}, "/venv/bin/mpiexec.hydra"),
        ("mvapich", {"/bin/mpiname": "MVAPICH2-GDR 2.3.7", "/bin/mpirun": HYDRA}, "mpirun"),
        ("slurm", {"/bin/srun": "", "/bin/sinfo": ""}, "srun"),
    ],
)
def test_of_several_mpis_the_right_one_is_run(name: str, programs: dict[str, str], found: str) -> None:
    assert BACK_ENDS[name].find(Machine(programs)) == found


@pytest.mark.parametrize("name", BACK_ENDS)
def test_a_missing_program_is_an_error_that_says_how_to_get_it(name: str) -> None:
    with pytest.raises(BackEndError, match=f"launcher '{name}' not installed: .*(Install|Build) (it|them)"):
        BACK_ENDS[name].find(Machine({}))
    with pytest.raises(RuntimeError, match="not installed"):  # as the field knows it
        BACK_ENDS[name].find(Machine({"/bin/mpirun": "something else", "/bin/mpiname": "MPICH", "/bin/srun": ""}))
