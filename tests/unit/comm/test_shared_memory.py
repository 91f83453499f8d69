"""Memory that ranks share, and the agreement to share it."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Callable, Iterator

import pytest

from deepspeed.comm import shared_memory
from deepspeed.comm.shared_memory import SharedMemory
from deepspeed.errors import CommError
from tests.unit.comm.thread_ranks import ThreadGather, mappings, share_in_threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc exist on Linux alone")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    fds = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == fds


def test_every_rank_sees_what_any_rank_writes() -> None:
    memories = share_in_threads(3)

    for rank, memory in enumerate(memories):
        assert isinstance(memory, SharedMemory)
        assert memory.rows[rank].tolist() == [0.0] * 100
        memory.rows[rank].fill_(rank + 1)

    for memory in memories:
        assert isinstance(memory, SharedMemory)
        assert [row.unique().tolist() for row in memory.rows] == [[1.0], [2.0], [3.0]]


def test_a_row_has_storage_of_its_own_and_of_its_size() -> None:
    memory = share_in_threads(2)[0]

    assert isinstance(memory, SharedMemory)
    assert [row.untyped_storage().nbytes() for row in memory.rows] == [400, 400]


def test_sharing_keeps_no_file_open() -> None:
    before = len(os.listdir("/proc/self/fd"))

    memories = share_in_threads(2)

    assert len(os.listdir("/proc/self/fd")) == before
    assert all(isinstance(memory, SharedMemory) for memory in memories)


def test_a_refused_file_on_one_rank_sends_all_to_the_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    create, calls = shared_memory._unnamed_file, iter([False, True])

    def refuse_the_second() -> int:
        if next(calls, False):
            raise PermissionError(1, "seccomp says no")
        return create()

    monkeypatch.setattr(shared_memory, "_unnamed_file", refuse_the_second)
    reasons = share_in_threads(3)

    assert all(isinstance(reason, str) and "cannot create shared memory" in reason for reason in reasons)
    assert sum("seccomp says no" in str(reason) for reason in reasons) == 1


def test_running_out_of_descriptors_is_a_reason_and_leaks_none() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 4, hard))
    try:
        reasons = share_in_threads(12)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert all(isinstance(reason, str) for reason in reasons)
    assert any("Too many open files" in str(reason) for reason in reasons)


def test_one_unwilling_rank_decides_for_all() -> None:
    assert all("group rank(s) [1] cannot create" in str(reason) for reason in share_in_threads(2, rank1=True))


def test_another_processor_or_system_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")

    assert all("linux on aarch64, needed Linux on x86_64" in str(reason) for reason in share_in_threads(2))


def _other_host(_: int, heard: list[list[int]]) -> None:
    if len(heard[0]) > 1:
        heard[1][4] += 1


def _other_inode(_: int, heard: list[list[int]]) -> None:
    if len(heard[0]) > 1:
        heard[1][9] += 1


def _other_start(_: int, heard: list[list[int]]) -> None:
    if len(heard[0]) > 1:
        heard[0][6] += 1


def _own_values_only(_: int, heard: list[list[int]]) -> None:
    heard[:] = [heard[0]] * len(heard)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_other_host, "the group spans hosts"),
        (_other_inode, "is another file"),
        (_other_start, "is not visible from process"),
        (_own_values_only, "only pretends to gather"),
    ],
)
def test_ranks_that_cannot_reach_each_other_use_the_back_end(
    change: Callable[[int, list[list[int]]], None], reason: str
) -> None:
    before = mappings()

    assert all(reason in str(answer) for answer in share_in_threads(2, ThreadGather(2, change)))
    assert mappings() == before


def test_when_one_rank_alone_cannot_map_all_are_told_which() -> None:
    def change(round_number: int, heard: list[list[int]]) -> None:
        if round_number == 1:
            heard[1] = [0]

    assert all("group rank(s) [1] cannot map" in str(answer) for answer in share_in_threads(2, ThreadGather(2, change)))


def test_ranks_that_ask_for_different_sizes_are_told_so() -> None:
    def change(_: int, heard: list[list[int]]) -> None:
        heard[1][2] = 99

    with pytest.raises(CommError, match=r"\[100, 99\] elements by group rank"):
        share_in_threads(2, ThreadGather(2, change))
