"""Ranks are threads here: the files, the board and what uses them are those of real ranks, the gather is a list."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from deepspeed.comm.shared_memory import Gather, SharedMemory, share_memory


class ThreadGather:
    """All-gather between threads; `change` may tamper with what a rank hears in round 0, 1, ..."""

    def __init__(self, world_size: int, change: Callable[[int, list[list[int]]], None] = lambda _, __: None) -> None:
        self._barrier = threading.Barrier(world_size, timeout=10)
        self._values: list[list[int]] = [[] for _ in range(world_size)]
        self._change = change

    def of(self, rank: int) -> Gather:
        rounds = iter(range(10))

        def gather(values: list[int]) -> list[list[int]]:
            self._values[rank] = values
            self._barrier.wait()
            heard = [list(each) for each in self._values]
            self._barrier.wait()
            self._change(next(rounds), heard)
            return heard

        return gather


def share_in_threads(
    world_size: int,
    gather: ThreadGather | None = None,
    numel: int = 100,
    dtype: torch.dtype = torch.float32,
    **unwilling: bool,
) -> list[SharedMemory | str]:
    """What each rank gets from `share_memory`; `rank1=True`: that rank does not want to."""
    gather = gather or ThreadGather(world_size)

    def one(rank: int) -> SharedMemory | str:
        return share_memory(numel, dtype, rank, world_size, gather.of(rank), not unwilling.get(f"rank{rank}"))

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(one, range(world_size)))


def memories(world_size: int, numel: int = 100, dtype: torch.dtype = torch.float32) -> list[SharedMemory]:
    """Memory of each rank, on a system that can share it."""
    shared = share_in_threads(world_size, numel=numel, dtype=dtype)
    assert all(isinstance(memory, SharedMemory) for memory in shared), shared
    return [memory for memory in shared if isinstance(memory, SharedMemory)]


def at_once(calls: Iterable[Callable[[], object]]) -> None:
    """Make each call in a thread of its own and wait for all; raise the first error."""
    calls = list(calls)
    with ThreadPoolExecutor(len(calls)) as threads:
        list(threads.map(lambda call: call(), calls))


def mappings() -> int:
    """How many unnamed files of ours this process maps."""
    return Path("/proc/self/maps").read_text().count("memfd:deepspeed")
