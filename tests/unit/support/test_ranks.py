from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import PRELOADED, RanksFailed, run_ranks


def _sum_of_ranks(rank: int, world_size: int, offset: int) -> torch.Tensor:
    mine = torch.tensor([float(rank + offset)])
    dist.all_reduce(mine)
    return mine


def _environment(rank: int, world_size: int) -> dict[str, object]:
    return {
        "started": dist.is_initialized(),
        "threads": torch.get_num_threads(),
        "random": torch.rand(1).item(),
        "cwd": os.getcwd(),
        **{name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "X")},
    }


def _at_the_start(rank: int, world_size: int, names: tuple[str, ...]) -> dict[str, object]:
    of = {name: sys.modules.get(name) for name in names}
    modules = {name: importlib.import_module(f"deepspeed.{name}") for name in ("accelerator.select", "comm.world")}
    return {
        "not loaded": [name for name, module in of.items() if module is None],
        "chosen": [name for name, module in modules.items() if module._current is not None],
        "native library": importlib.import_module("deepspeed.ops.native.library")._load.cache_info().currsize,
        "warned": importlib.import_module("deepspeed.common.logging")._warned,
    }


def _frozen(rank: int, world_size: int) -> tuple[int, int]:
    """Objects out of the collector's sight, and those in it."""
    return gc.get_freeze_count(), len(gc.get_objects())


def _starts_its_own_group(rank: int, world_size: int) -> int:
    dist.init_process_group("gloo")
    return dist.get_world_size()


def _rank_one_raises_while_the_others_wait(rank: int, world_size: int) -> None:
    print(f"rank {rank} says hello")
    if rank == 1:
        raise ValueError("the cause")
    dist.all_reduce(torch.ones(1))


def _rank_zero_dies(rank: int, world_size: int, how: str) -> None:
    if rank == 0:
        os._exit(7) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def _rank_one_waits_for_ever(rank: int, world_size: int) -> int:
    if rank == 1:
        _a_call_that_never_returns()
    return rank


def _a_call_that_never_returns() -> None:
    time.sleep(3600)


def _leaves_early(rank: int, world_size: int) -> float:
    """Rank 0 returns while rank 1 still has not read what it sent."""
    if rank == 0:
        dist.send(torch.ones(1000), dst=1)
        return 0.0
    time.sleep(0.3)
    got = torch.zeros(1000)
    dist.recv(got, src=0)
    return got.sum().item()


def _result_that_cannot_be_pickled(rank: int, world_size: int) -> object:
    return lambda: None


def _pid(rank: int, world_size: int) -> int:
    return os.getpid()


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_rank_finds_everything_loaded_and_nothing_chosen() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    (found,) = run_ranks(_at_the_start, 1, PRELOADED, init=False)
    assert found == {"not loaded": [], "chosen": [], "native library": 0, "warned": set()}


def test_the_collector_of_a_rank_looks_at_none_of_what_was_loaded_for_it() -> None:
    ((frozen, looked_at),) = run_ranks(_frozen, 1, init=False)
    assert frozen > 100_000  # torch alone has more
    assert looked_at < frozen / 10


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_rank_returns_its_result_in_order_of_rank(world_size: int) -> None:
    results = run_ranks(_sum_of_ranks, world_size, 10)
    assert [r.item() for r in results] == [sum(range(10, 10 + world_size))] * world_size


def test_ranks_have_the_launchers_variables_one_thread_and_the_same_seed() -> None:
    first, second = run_ranks(_environment, 2, env={"X": "y"})
    assert (first.pop("RANK"), second.pop("RANK")) == ("0", "1")
    assert (first.pop("LOCAL_RANK"), second.pop("LOCAL_RANK")) == ("0", "1")
    assert first == second
    assert first == {
        "started": True,
        "threads": 1,
        "random": first["random"],
        "cwd": os.getcwd(),
        "WORLD_SIZE": "2",
        "LOCAL_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "X": "y",
    }


def test_a_variable_set_by_the_test_reaches_ranks_forked_from_an_older_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("X", "set after the server started")
    assert run_ranks(_environment, 1)[0]["X"] == "set after the server started"
    monkeypatch.delenv("X")
    assert run_ranks(_environment, 1, init=False)[0]["X"] is None


def test_a_function_may_start_the_process_group_itself() -> None:
    assert run_ranks(_starts_its_own_group, 2, init=False) == [2, 2]


def test_the_cause_comes_before_the_echoes_of_its_peers() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_rank_one_raises_while_the_others_wait, 3)
    failures = caught.value.failures
    assert [failures[0].rank, failures[0].kind] == [1, "raised"]
    assert {f.rank for f in failures} == {0, 1, 2}
    text = str(caught.value)
    assert text.index("ValueError: the cause") < text.index("rank 0")
    assert "in _rank_one_raises_while_the_others_wait" in text
    assert "rank 1 says hello" in failures[0].output


@pytest.mark.parametrize(("how", "told"), [("exit", "exit status 7"), ("kill", "killed by SIGKILL")])
def test_a_rank_that_dies_is_reported_with_its_status(how: str, told: str) -> None:
    with pytest.raises(RanksFailed, match=told) as caught:
        run_ranks(_rank_zero_dies, 2, how)
    assert [caught.value.failures[0].rank, caught.value.failures[0].kind] == [0, "died"]


def test_a_hang_ends_at_the_time_out_and_shows_where_the_rank_stands() -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1 hung") as caught:
        run_ranks(_rank_one_waits_for_ever, 2, timeout_seconds=2)
    assert time.monotonic() - began < 20
    assert [f.rank for f in caught.value.failures] == [1]
    assert "_a_call_that_never_returns" in str(caught.value)


def test_a_rank_that_returns_early_does_not_disturb_its_peers() -> None:
    assert run_ranks(_leaves_early, 2) == [0.0, 1000.0]


def test_a_result_that_cannot_be_pickled_is_a_failure_of_its_rank() -> None:
    with pytest.raises(RanksFailed, match="pickle"):
        run_ranks(_result_that_cannot_be_pickled, 1)


def test_no_process_is_left_behind() -> None:
    pids = run_ranks(_pid, 3)
    assert len(set(pids)) == 3
    assert all(_gone(pid) for pid in pids)


def test_what_ranks_print_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RanksFailed):
        run_ranks(_rank_one_raises_while_the_others_wait, 2)
    sys.stdout.flush()
    assert "rank 0 says hello" in capfd.readouterr().out
