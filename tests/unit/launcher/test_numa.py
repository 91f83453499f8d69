from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.launcher import numa
from deepspeed.launcher.numa import CoreListError, cores_of_rank, get_numactl_cmd, numactl_argv, parse_range_list

CORES = st.sets(st.integers(0, 64), min_size=1).map(sorted)


def test_a_core_list_is_numbers_and_ranges() -> None:
    assert parse_range_list("1,3-5,7") == [1, 3, 4, 5, 7]
    assert parse_range_list("0-31") == list(range(32))


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1", "1,,2", "1-2-3", "0x1"])
def test_a_malformed_core_list_is_refused(text: str) -> None:
    with pytest.raises(CoreListError, match="is no core and no rising range"):
        parse_range_list(text)


def test_a_core_named_twice_is_refused() -> None:
    with pytest.raises(CoreListError, match=r"names cores \[2\] more than once"):
        parse_range_list("1-2,2")


@given(cores=CORES, local_size=st.integers(1, 8))
def test_ranks_get_equal_disjoint_shares_in_order(cores: list[int], local_size: int) -> None:
    if len(cores) < local_size:
        with pytest.raises(CoreListError, match="at least one core per rank"):
            cores_of_rank(cores, local_size, 0)
        return
    shares = [cores_of_rank(cores, local_size, rank) for rank in range(local_size)]
    assert [core for share in shares for core in share] == cores[: len(cores) // local_size * local_size]
    assert {len(share) for share in shares} == {len(cores) // local_size}


@given(CORES)
def test_the_cores_of_a_numactl_command_read_back(cores: list[int]) -> None:
    assert parse_range_list(numactl_argv(cores, {})[-1]) == cores


def test_memory_is_bound_to_the_nodes_of_the_cores_where_there_are_several() -> None:
    nodes = {0: [0, 1, 2, 3], 1: [4, 5, 6, 7], 2: []}
    assert numactl_argv([0, 1], nodes) == ["numactl", "-m", "0", "-C", "0-1"]
    assert numactl_argv([3, 4], nodes) == ["numactl", "-m", "0-1", "-C", "3-4"]
    assert numactl_argv([0, 1], {0: [0, 1]}) == ["numactl", "-C", "0-1"]


def test_two_threads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for thread, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{thread}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    assert numa.machine_cores(tmp_path) == [0, 1]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 3})
    assert numa.machine_cores(tmp_path) == [2, 3]


def test_memory_nodes_are_read_with_empty_ones(tmp_path: Path) -> None:
    for node, cores in enumerate(("0-1", "2-3", "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores + "\n")
    assert numa.machine_nodes(tmp_path) == {0: [0, 1], 1: [2, 3], 2: []}


def test_the_numactl_words_of_a_rank_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    monkeypatch.setattr(numa, "machine_nodes", lambda: {0: [0, 1, 2, 3]})
    assert get_numactl_cmd("0-3", 2, 1) == (2, ["numactl", "-C", "2-3"])


def test_a_second_binder_of_threads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMP_AFFINITY", "granularity=fine")
    with pytest.raises(CoreListError, match="unset KMP_AFFINITY"):
        get_numactl_cmd("0-3", 2, 0)
