"""Whole jobs on one machine: what each rank is given, and where its output goes."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import Job, run_job, wait_until

# Each rank leaves its arguments and environment in a file.
TELL = """
import json, os, sys
here = {"args": sys.argv[1:], "environ": dict(os.environ), "cores": sorted(os.sched_getaffinity(0)), "cwd": os.getcwd()}
open(os.environ["TOLD"] + "/rank" + os.environ["RANK"], "w").write(json.dumps(here))
"""


@pytest.fixture
def tell(tmp_path: Path) -> Path:
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    return script


def _told(folder: Path, words: list[str], environment: dict[str, str] | None = None) -> list[dict[str, Any]]:
    status, output = run_job(folder, words, {"TOLD": str(folder), **(environment or {})})
    assert status == 0, output
    return _read(folder)


def _read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(len(list(folder.glob("rank*"))))]


def test_each_rank_is_settled_its_place(tmp_path: Path, tell: Path) -> None:
    for rank, told in enumerate(_told(tmp_path, ["--num_gpus", "3", str(tell)])):
        environ = told["environ"]
        assert (environ["RANK"], environ["LOCAL_RANK"], environ["WORLD_SIZE"]) == (str(rank), str(rank), "3")
        assert (environ["LOCAL_SIZE"], environ["CROSS_RANK"], environ["CROSS_SIZE"]) == ("3", "0", "1")
        assert (environ["MASTER_ADDR"], environ["CUDA_VISIBLE_DEVICES"]) == ("127.0.0.1", "0,1,2")
        assert int(environ["MASTER_PORT"]) >= 29500
        assert told["args"] == [f"--local_rank={rank}"]
        assert told["cwd"] == str(tmp_path)


AWKWARD = [
    "a b",
    'say "hi"',
    "it's",
    "$HOME `id` $(id)",
    "two\nlines",
    "caf\u00e9 \u2713",
    "",
    "--num_gpus",
    "--",
    "-q",
    "\\",
    "*",
]


def test_arguments_and_environment_arrive_unchanged(tmp_path: Path, tell: Path) -> None:
    environment = {f"AWKWARD_{i}": word for i, word in enumerate(AWKWARD)}
    (told,) = _told(tmp_path, [str(tell), *AWKWARD], environment)
    assert told["args"] == ["--local_rank=0", *AWKWARD]
    assert {name: told["environ"][name] for name in environment} == environment


def test_a_machine_with_only_its_cpu_runs_one_rank(tmp_path: Path, tell: Path) -> None:
    assert len(_told(tmp_path, [str(tell)])) == 1


@pytest.mark.parametrize(
    ("words", "environment", "slots"),
    [
        (["--include", "localhost:1,3"], {}, "1,3"),
        ([], {"CUDA_VISIBLE_DEVICES": "0,2"}, "0,2"),
        (["--num_gpus", "2"], {"CUDA_VISIBLE_DEVICES": "5"}, "0,1"),
    ],
)
def test_chosen_devices_are_the_visible_ones(
    tmp_path: Path, tell: Path, words: list[str], environment: dict[str, str], slots: str
) -> None:
    told = _told(tmp_path, [*words, str(tell)], environment)
    assert [each["environ"]["CUDA_VISIBLE_DEVICES"] for each in told] == [slots, slots]


def test_a_hostfile_of_this_machine_alone_needs_no_ssh(tmp_path: Path, tell: Path) -> None:
    (tmp_path / "hosts").write_text("# this one\nlocalhost slots=2\n")
    told = _told(tmp_path, ["-H", "hosts", str(tell)], {"PATH": "/nowhere"})
    assert [each["environ"]["RANK"] for each in told] == ["0", "1"]
    (tmp_path / "rank1").unlink()
    assert len(_told(tmp_path, ["-H", "hosts", "-e", "localhost:0", str(tell)])) == 1


def test_ranks_of_two_hosts_started_without_ssh_count_on(tmp_path: Path, tell: Path) -> None:
    (tmp_path / "hosts").write_text("one slots=1\ntwo slots=2\n")
    meeting = ["--master_addr", "127.0.0.1", "--master_port", "29377"]
    words = [["-H", "hosts", "--no_ssh", "--node_rank", str(node_rank), *meeting, str(tell)] for node_rank in (0, 1)]
    environment = {"TOLD": str(tmp_path)}
    with Job(tmp_path, words[1], environment) as second, Job(tmp_path, words[0], environment) as first:
        assert first.wait() == 0, first.output
        assert second.wait() == 0, second.output
    environs = [told["environ"] for told in _read(tmp_path)]
    assert [(e["RANK"], e["LOCAL_RANK"], e["LOCAL_SIZE"], e["CROSS_RANK"]) for e in environs] == [
        ("0", "0", "1", "0"),
        ("1", "0", "2", "1"),
        ("2", "1", "2", "1"),
    ]
    assert {(e["WORLD_SIZE"], e["CROSS_SIZE"], e["MASTER_PORT"]) for e in environs} == {("3", "2", "29377")}


def test_a_module_runs_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "tell.py").write_text(TELL)
    (told,) = _told(tmp_path, ["--module", "--no_local_rank", "pkg.tell", "-x"])
    assert told["args"] == ["-x"]


def test_a_command_that_is_not_python_runs_after_a_separator(tmp_path: Path) -> None:
    script = 'printf "%s|" "$RANK" "$@" > told$RANK'
    words = ["--num_gpus", "2", "--no_python", "--no_local_rank", "--", "sh", "-c", script, "sh", "a b", "--", "c"]
    status, output = run_job(tmp_path, words)
    assert status == 0, output
    assert [(tmp_path / f"told{rank}").read_text() for rank in (0, 1)] == ["0|a b|--|c|", "1|a b|--|c|"]


def test_a_command_that_does_not_exist_is_settled(tmp_path: Path) -> None:
    status, output = run_job(tmp_path, ["--num_gpus", "2", "--no_python", "./none"])
    assert status == 1
    assert "rank 0 cannot run './none': No such file or directory" in output


def test_a_script_that_does_not_exist_gives_pythons_status(tmp_path: Path) -> None:
    status, output = run_job(tmp_path, ["none.py"])
    assert status == 2
    assert "can't open file" in output


def test_variables_come_from_files_and_stay_out_of_the_output(tmp_path: Path, tell: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".deepspeed_env").write_text("# cluster\n\nA=from-home\nTOKEN='s3cret $x'\n")
    (tmp_path / ".deepspeed_env").write_text("A=from-here\nRANK=99\n")
    status, output = run_job(tmp_path, [str(tell)], {"TOLD": str(tmp_path), "A": "from-shell"})
    assert status == 0, output
    environ = _read(tmp_path)[0]["environ"]
    assert (environ["A"], environ["TOKEN"], environ["RANK"]) == ("from-here", "s3cret $x", "0")
    assert "TOKEN" in output
    assert "s3cret" not in output


def test_the_file_of_variables_can_have_another_name(tmp_path: Path, tell: Path) -> None:
    (tmp_path / "vars").write_text("A=1\n")
    (told,) = _told(tmp_path, [str(tell)], {"DS_ENV_FILE": "vars"})
    assert told["environ"]["A"] == "1"


def test_a_bad_file_of_variables_stops_the_job(tmp_path: Path, tell: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("A=1\noops s3cret\n")
    status, output = run_job(tmp_path, [str(tell)], {"TOLD": str(tmp_path)})
    assert status == 1
    assert "line 2 is not NAME=VALUE" in output
    assert "s3cret" not in output
    assert not list(tmp_path.glob("rank*"))


def test_each_rank_can_have_its_own_log(tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text(
        "import os, sys; r = os.environ['RANK']; print('out', r); print('err', r, file=sys.stderr)"
    )
    status, output = run_job(tmp_path, ["--num_gpus", "2", "--enable_each_rank_log", "logs", "say.py"])
    assert status == 0, output
    logs = sorted((tmp_path / "logs").iterdir(), key=lambda path: path.name[-6:])
    assert [path.name[14:] for path in logs] == ["_rank0.log", "_rank1.log"]
    assert [path.read_text() for path in logs] == ["out 0\nerr 0\n", "out 1\nerr 1\n"]
    assert "out 0" not in output


def test_a_log_folder_that_is_a_file_is_refused(tmp_path: Path, tell: Path) -> None:
    (tmp_path / "logs").touch()
    status, output = run_job(tmp_path, ["--enable_each_rank_log", "logs", str(tell)], {"TOLD": str(tmp_path)})
    assert status == 1
    assert "--enable_each_rank_log logs" in output


def test_the_launchers_process_id_can_be_kept_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "hold.py").write_text("import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.02)\n")
    with Job(tmp_path, ["--save_pid", "hold.py"]) as job:
        path = tmp_path / "tmp" / f"{job.process.pid}.ds"
        wait_until(lambda: path.exists() and bool(path.read_text()), "the file is written")
        assert int(path.read_text()) == job.launcher().pid
        (tmp_path / "go").touch()
        assert job.wait() == 0
        assert not list((tmp_path / "tmp").iterdir())
        assert f"launcher pid: {path.stem}" not in job.output
        assert "launcher pid: " in job.output


def test_quiet_jobs_print_nothing_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text("print('hello')")
    assert run_job(tmp_path, ["-q", "say.py"]) == (0, "hello\n")
    assert run_job(tmp_path, ["--log_level", "error", "say.py"]) == (0, "hello\n")
    assert "meeting at 127.0.0.1:" in run_job(tmp_path, ["say.py"])[1]


def test_values_of_variables_and_commands_are_printed_at_debug_only(tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text("print('hello')")
    assert "s3cret" not in run_job(tmp_path, ["say.py", "--key=s3cret"], {"NCCL_KEY": "s3cret"})[1]
    assert "--key=s3cret" in run_job(tmp_path, ["--log_level", "debug", "say.py", "--key=s3cret"])[1]


def test_a_file_of_the_user_named_like_one_of_pythons_does_not_break_the_launcher(tmp_path: Path, tell: Path) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("python -P came with 3.11")
    for name in ("tty.py", "queue.py", "psutil.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')")
    entry = "from deepspeed.launcher.runner import main; main()"
    with Job(tmp_path, [str(tell)], {"TOLD": str(tmp_path)}, command=[sys.executable, "-P", "-c", entry]) as job:
        assert job.wait() == 0, job.output
    assert len(_read(tmp_path)) == 1


def test_a_port_in_use_is_replaced_unless_the_user_fixed_it(tmp_path: Path, tell: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status, output = run_job(tmp_path, ["--master_port", str(port), str(tell)], {"TOLD": str(tmp_path)})
        assert status == 1
        assert f"--master_port {port} is in use on this machine" in output
        assert not list(tmp_path.glob("rank*"))
    (told,) = _told(tmp_path, ["--master_port", str(port), str(tell)])
    assert told["environ"]["MASTER_PORT"] == str(port)


MEET = """
import os, socket, time
address, rank = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), os.environ["RANK"]
if rank == "0":
    server = socket.create_server(address)
    peer, _ = server.accept()
    assert peer.recv(100).decode() == os.environ["JOB"]
else:
    while True:
        try:
            socket.create_connection(address).sendall(os.environ["JOB"].encode())
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
print("FINE", flush=True)
"""


def test_jobs_started_at_once_with_default_settings_all_run(tmp_path: Path) -> None:
    (tmp_path / "meet.py").write_text(MEET)
    jobs = [Job(tmp_path, ["--num_gpus", "2", "meet.py"], {"JOB": f"job{i}"}) for i in range(4)]
    for job in jobs:
        with job:
            assert job.wait() == 0, job.output
            assert job.output.count("FINE") == 2


def test_cores_are_divided_among_ranks(tmp_path: Path, tell: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip(f"two ranks need two cores; this process may use {cores}")
    words = ["--num_gpus", "2", "--bind_cores_to_rank", "--bind_core_list", f"{cores[0]},{cores[1]}", str(tell)]
    told = _told(tmp_path, words)
    assert [each["cores"] for each in told] == [[cores[0]], [cores[1]]]
    assert [each["environ"]["OMP_NUM_THREADS"] for each in told] == ["1", "1"]


def test_on_a_terminal_a_rank_sees_a_terminal_of_its_size(tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(
        "import os, sys; print('saw', sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size(1).columns)"
    )
    ours, theirs = pty.openpty()
    subprocess.run(["stty", "cols", "91", "rows", "20"], stdin=theirs, check=True)
    with Job(tmp_path, ["-q", "look.py"]) as unused:  # for its environment
        environment = unused.environment
        unused.wait()
    process = subprocess.Popen(
        [sys.executable, "-m", "deepspeed.launcher.runner", "-q", "look.py"],
        cwd=tmp_path,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    written = b""
    while process.poll() is None or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.05)[0]:
            try:
                written += os.read(ours, 4096)
            except OSError:  # the terminal's last user is gone
                break
    os.close(ours)
    assert process.wait() == 0
    assert written == b"saw True True 91\r\n"


def test_a_slow_reader_gets_everything_a_finished_job_wrote(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text("import sys; sys.stdout.write('x' * 500_000)")
    runner = shlex.join([sys.executable, "-m", "deepspeed.launcher.runner", "-q", "talk.py"])
    slow = "import os, sys, time\nwhile data := os.read(0, 4096): time.sleep(0.01); os.write(1, data)"
    with Job(tmp_path, [f"{runner} | {shlex.join([sys.executable, '-c', slow])} | wc -c"], command=["bash", "-c"]) as job:
        assert job.wait() == 0
        assert job.output == "500000\n"


def test_a_reader_that_goes_away_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text("while True: print('x' * 1000)")
    runner = shlex.join([sys.executable, "-m", "deepspeed.launcher.runner", "-q", "--num_gpus", "2", "talk.py"])
    with Job(tmp_path, [f"{runner} 2>errors | head -n 1 | wc -l"], command=["bash", "-c"]) as job:
        assert job.wait() == 0
        job.assert_gone(time.monotonic())
        assert job.output == "1\n"
    assert "BrokenPipeError" in (tmp_path / "errors").read_text()


SUM = """
import os, deepspeed, torch
deepspeed.init_distributed()
total = torch.ones(1)
deepspeed.comm.all_reduce(total)
assert total.item() == deepspeed.comm.get_world_size() == 2
line = f"rank {deepspeed.comm.get_rank()} local {os.environ['LOCAL_RANK']} FINE\\n"
os.write(1, line.encode())  # one write: the ranks of torchrun share their output
"""


@pytest.mark.parametrize(
    ("module", "words"),
    [("deepspeed.launcher.runner", ["--num_gpus", "2"]), ("torch.distributed.run", ["--nproc_per_node", "2"])],
)
def test_ranks_meet_under_our_launcher_and_under_torchrun(tmp_path: Path, module: str, words: list[str]) -> None:
    (tmp_path / "sum.py").write_text(SUM)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Job(tmp_path, [*words, "--master_port", str(port), "sum.py"], command=[sys.executable, "-m", module]) as job:
        assert job.wait(120) == 0, job.output
        assert sorted(line for line in job.output.splitlines() if "FINE" in line) == [
            "rank 0 local 0 FINE",
            "rank 1 local 1 FINE",
        ]
