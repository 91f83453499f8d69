"""The GPT example on three hosts of two ranks, over each back end: the losses are those of six ranks on one machine."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host_jobs import BY_RANK, RUNNER, run_on_hosts, skip_unless_installed, start_by_hand
from tests.support.hosts import Hosts, hosts
from tests.support.launching import ROOT, Job
from tests.support.slurm import slurm

STEPS = 3
SCRIPT = (
    *(str(ROOT / "examples" / "gpt" / "train.py"), "--data", str(ROOT / "deepspeed" / "config"), "--out", "out"),
    *("--steps", str(STEPS), "--validate-every", str(STEPS), "--batch", "2", "--context", "16", "--vocab", "270"),
    *("--depth", "1", "--width", "16", "--heads", "2", "--sample-tokens", "1"),
)
# As the environment of a job on one machine is, so that a rank computes with the same number of threads everywhere.
FILE = "OMP_NUM_THREADS=1\n"


@pytest.fixture(scope="module")
def trio() -> Iterator[Hosts]:
    with hosts(3, slots=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def on_one_machine(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The losses of six ranks on this machine."""
    folder = tmp_path_factory.mktemp("one")
    with Job(folder, ["--num_gpus", "6", *SCRIPT], command=RUNNER) as job:
        assert job.wait(120) == 0, job.output
        job.assert_gone(time.monotonic())
    return _losses(folder)


def _losses(folder: Path) -> list[list[str]]:
    found = []
    for metric in ("Train_Samples_train_loss", "Validation_Samples_loss"):
        with (folder / "out" / "csv" / f"{metric}.csv").open() as file:
            found += list(csv.reader(file))
    assert len(found) > STEPS
    return found


@pytest.mark.parametrize("back_end", ["pdsh", *BY_RANK])
def test_losses_over_each_back_end_are_those_of_one_machine(
    trio: Hosts, tmp_path: Path, back_end: str, on_one_machine: list[list[str]]
) -> None:
    skip_unless_installed(back_end)
    (tmp_path / ".deepspeed_env").write_text(FILE)
    words = ["--launcher", back_end, *SCRIPT]
    if back_end == "slurm":
        with slurm(trio) as scheduler:
            status, output = run_on_hosts(trio, tmp_path, words, scheduler.environment, seconds=120)
    else:
        status, output = run_on_hosts(trio, tmp_path, words, seconds=120)
    assert status == 0, output
    assert _losses(tmp_path) == on_one_machine


def test_losses_of_hosts_started_one_by_one_are_those_of_one_machine(
    trio: Hosts, tmp_path: Path, on_one_machine: list[list[str]]
) -> None:
    def words(number: int) -> list[str]:
        return ["--no_ssh", "--node_rank", str(number), "--master_addr", trio[1].address, *SCRIPT]

    with start_by_hand(trio, tmp_path, words) as jobs:
        assert [job.wait(120) for job in jobs] == [0, 0, 0], "\n".join(job.output for job in jobs)
    assert _losses(tmp_path) == on_one_machine
