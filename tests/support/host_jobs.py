"""Jobs of the `deepspeed` command over the hosts of `tests.support.hosts`, by every back end that is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepspeed.launcher.backends import BACK_ENDS, BackEndError
from deepspeed.launcher.far_hosts import InstalledPrograms
from tests.support.hosts import Hosts
from tests.support.launching import Job

__all__ = ["BY_RANK", "host_job", "run_on_hosts", "start_by_hand"]

BY_RANK = ("openmpi", "mpich", "impi", "slurm")
"""Back ends that start a member per rank."""

RUNNER = (sys.executable, "-m", "deepspeed.launcher.runner")


def skip_unless_installed(back_end: str) -> None:
    """Skip the test with the reason where the back end is absent."""
    try:
        BACK_ENDS[back_end].find(InstalledPrograms())
    except BackEndError as error:
        pytest.skip(str(error))


def host_job(
    cluster: Hosts,
    folder: Path,
    words: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    front_end: int = 1,
) -> Job:
    """A job whose command runs on host number `front_end`, in `folder`, with the hostfile of the cluster."""
    command = cluster[front_end].command(*RUNNER, "-H", str(cluster.hostfile), folder=folder)
    return Job(folder, words, environment, command=command)


def run_on_hosts(
    cluster: Hosts,
    folder: Path,
    words: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    seconds: float = 90,
    front_end: int = 1,
) -> tuple[int, str]:
    """Run such a job to its end: (exit status, output)."""
    with host_job(cluster, folder, words, environment, front_end=front_end) as job:
        status = job.wait(seconds)
        return status, job.output


@contextmanager
def start_by_hand(
    cluster: Hosts, folder: Path, words: Callable[[int], Sequence[str]], environment: Mapping[str, str] | None = None
) -> Iterator[list[Job]]:
    """Jobs of one command per host, as a person or Kubernetes starts them; `words` gets the host's number from 0."""
    jobs: list[Job] = []
    try:
        for host in cluster:
            own = folder / host.name
            own.mkdir(exist_ok=True)
            command = host.command(*RUNNER, "-H", str(cluster.hostfile), folder=folder)
            jobs.append(Job(own, words(host.number - 1), environment, command=command))
        yield jobs
    finally:
        for job in jobs:
            job.__exit__(None, None, None)
