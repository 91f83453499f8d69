"""However a job on several hosts breaks, it ends on all of them, in time, with one status, and the user reads why once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host_failures import FAILURES, Failure, Outcome, break_job
from tests.support.hosts import Hosts, hosts
from tests.support.slurm import Slurm, slurm

_PROGRAMS = {"pdsh": "pdsh", "openmpi": "mpirun.openmpi", "mpich": "mpirun.mpich"}


def _marks(failure: Failure) -> list[pytest.MarkDecorator]:
    return [pytest.mark.alone] if failure.is_waited_for else []


_OVER_SLURM = [pytest.param(each, id=each.name, marks=_marks(each)) for each in FAILURES if "slurm" in each.launchers]
_OVER_OTHERS = [
    pytest.param(name, each, id=f"{name}-{each.name}", marks=_marks(each))
    for each in FAILURES
    for name in each.launchers
    if name != "slurm"
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Hosts]:
    with hosts(3, slots=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def scheduled() -> Iterator[tuple[Hosts, Slurm]]:
    with hosts(3, slots=2) as cluster, slurm(cluster) as made:
        yield cluster, made


@pytest.mark.parametrize(("launcher", "failure"), _OVER_OTHERS)
def test_a_job_that_breaks_ends(launcher: str, failure: Failure, cluster: Hosts, tmp_path: Path) -> None:
    program = _PROGRAMS.get(launcher)
    if program is not None and not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    _assert_ended(break_job(failure, cluster, tmp_path, launcher), failure)


@pytest.mark.parametrize("failure", _OVER_SLURM)
def test_a_job_of_slurm_that_breaks_ends(failure: Failure, scheduled: tuple[Hosts, Slurm], tmp_path: Path) -> None:
    cluster, made = scheduled
    _assert_ended(break_job(failure, cluster, tmp_path, "slurm", made.environment), failure)


def _assert_ended(outcome: Outcome, failure: Failure) -> None:
    assert not outcome.orphans, outcome
    assert outcome.seconds <= failure.seconds, outcome
    assert not outcome.remains, outcome
    if failure.status is not None:
        assert set(outcome.statuses) == {failure.status}, outcome.output
        assert 1 <= outcome.output.count(failure.told) <= len(outcome.statuses), outcome.output
