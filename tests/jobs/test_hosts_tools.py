"""The tools for several hosts, on three of them: check, report, ds_ssh, ds_bench; and the recipe for Kubernetes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.host_jobs import run_on_hosts, skip_unless_installed
from tests.support.hosts import LOCAL_FOLDER, Hosts, hosts
from tests.support.launching import ROOT, Job, wait_until

SUM = """
import os, torch
from deepspeed import comm
comm.init_distributed("gloo", verbose=False)
values = torch.tensor([float(comm.get_rank())])
comm.all_reduce(values)
print(f"sum {values.item()} of {comm.get_world_size()}", flush=True)
comm.destroy_process_group()
"""


@pytest.fixture(scope="module")
def trio() -> Iterator[Hosts]:
    with hosts(3, slots=2) as cluster:
        yield cluster


def _run(cluster: Hosts, folder: Path, *argv: str) -> tuple[int, str]:
    """Run `argv` on node1 in `folder`: (exit status, output)."""
    with Job(folder, [], {"COLUMNS": "200"}, command=cluster[1].command(*argv, folder=folder)) as job:
        return job.wait(90), job.output


def _check(cluster: Hosts, folder: Path, hostfile: Path, *more: str, at: Path | None = None) -> tuple[int, str]:
    """Run `deepspeed --check` on node1 in `folder`, or in its own folder `at`."""
    runner = (sys.executable, "-m", "deepspeed.launcher.runner", "--check", "-H", str(hostfile), *more)
    return _run(cluster, folder, "sh", "-c", f'cd {at or folder} && exec "$@"', "sh", *runner)


def test_check_finds_three_good_hosts_ready(trio: Hosts, tmp_path: Path) -> None:
    status, output = _check(trio, tmp_path, trio.hostfile)
    assert status == 0, output
    assert "All hosts are ready." in output
    for line in [line for line in output.splitlines() if "node" in line]:
        assert line.count("ok") == 1, output
        assert "shared" in line, output


def test_check_says_what_to_do_about_each_host(trio: Hosts, tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(trio.hostfile.read_text() + "node9 slots=2\n")
    own = LOCAL_FOLDER / "job"  # of node1 alone; node3 has an empty one
    for number in (1, 3):
        trio[number].run("mkdir", "-p", str(own))
    listen = "import signal, socket; s = socket.create_server(('', 29777)); print('up', flush=True); signal.pause()"
    with Job(tmp_path, [], command=trio[1].command(sys.executable, "-c", listen)) as holder:
        wait_until(lambda: "up" in holder.output, "the port is taken")
        status, output = _check(trio, tmp_path, hostfile, "--master_port", "29777", at=own)
    assert status == 1, output
    assert f"- node2 has no {own}: start from a folder that all hosts share" in output
    assert f"- {own} on node3 is not the one here" in output
    assert "- port 29777 on node1: Address already in use. Give another --master_port" in output
    assert "- node9: make `ssh node9 true` work without a password" in output


def test_report_over_all_hosts_tells_what_differs(trio: Hosts, tmp_path: Path) -> None:
    argv = (sys.executable, "-m", "deepspeed.env_report", "--all-hosts", "-H", str(trio.hostfile))
    status, output = _run(trio, tmp_path, *argv)
    assert (status, output.splitlines()[-2:]) == (0, ["3 of 3 host(s) answered: node1, node2, node3", "nothing differs"])
    trio[2].run("mount", "-o", "remount,size=512M", "/dev/shm")
    status, output = _run(trio, tmp_path, *argv)
    trio[2].run("mount", "-o", "remount,size=1G", "/dev/shm")
    assert status == 1
    assert [line for line in output.splitlines() if line.startswith("- ")] == [
        "- shm: node1, node3: 1.00 GB | node2: 0.50 GB"
    ]


def test_ds_ssh_runs_a_command_on_every_host(trio: Hosts, tmp_path: Path) -> None:
    if shutil.which("pdsh") is None:
        pytest.skip("pdsh is not installed: apt-get install pdsh")
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("# the hosts\n" + trio.hostfile.read_text())
    argv = (sys.executable, "-m", "deepspeed.launcher.ssh_command", "-f", str(hostfile))
    status, output = _run(trio, tmp_path, *argv, "hostname")
    assert status == 0, output
    assert {f"node{n}: node{n}" for n in (1, 2, 3)} <= set(output.splitlines())
    assert f"hostfile={hostfile}" in output
    assert _run(trio, tmp_path, *argv, "test $(hostname) != node2 || exit 7")[0] == 7


def test_bench_measures_between_hosts(trio: Hosts, tmp_path: Path) -> None:
    skip_unless_installed("pdsh")
    words = [
        "--launcher",
        "pdsh",
        "--num_gpus",
        "1",
        "--module",
        "deepspeed.bench",
        "--all-reduce",
        "--maxsize",
        "6",
        "--scan",
    ]
    status, output = run_on_hosts(trio, tmp_path, [*words, "--json", "found.json"])
    assert status == 0, output
    assert "---- all-reduce, float32, 3 ranks ----" in output
    assert (tmp_path / "found.json").read_text().count('"all-reduce"') == 6  # sizes rounded up to multiples of 3


def _container() -> dict[str, Any]:
    manifest = yaml.safe_load((ROOT / "examples/kubernetes/jobset.yaml").read_text())
    (job,) = manifest["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    name = f"{manifest['metadata']['name']}-{job['name']}-0-{{}}.{manifest['spec']['network']['subdomain']}"
    environ = {each["name"]: each["value"] for each in container["env"]}
    assert pods["completions"] == pods["parallelism"] == int(environ["HOSTS"]) == 3
    assert pods["completionMode"] == "Indexed"
    assert environ["POD_NAMES"] == name, "as JobSet calls pods"
    assert environ["SLOTS"] == container["resources"]["limits"]["nvidia.com/gpu"]
    return {"command": container["command"], "environ": environ, "name": name}


def test_the_command_of_the_kubernetes_manifest_runs_on_three_hosts(trio: Hosts, tmp_path: Path) -> None:
    container = _container()
    with (trio.folder / "hosts").open("a") as names:  # the headless service
        names.writelines(f"{host.address} {container['name'].format(host.number - 1)}\n" for host in trio)
    (tmp_path / "train.py").write_text(SUM)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    jobs: list[Job] = []
    try:
        for host in reversed(list(trio)):  # the host of rank 0 comes last
            own = tmp_path / host.name
            own.mkdir()
            environ = {**container["environ"], "JOB_COMPLETION_INDEX": str(host.number - 1), "PATH": path}
            jobs.append(Job(own, [], environ, command=host.command(*container["command"], folder=tmp_path)))
        statuses = [job.wait(90) for job in jobs]
        assert statuses == [0, 0, 0], [job.output for job in jobs]
        assert [job.output.count("sum 15.0 of 6") for job in jobs] == [2, 2, 2]
    finally:
        for job in jobs:
            job.__exit__(None, None, None)
