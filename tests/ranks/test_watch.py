"""Ranks that can never go on are told who waits where, all of them, within seconds; ranks that are only slow are not."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed import comm
from deepspeed.comm import watch
from deepspeed.comm.algorithms import flat_all_reducer
from deepspeed.comm.world import current_world
from deepspeed.errors import CommError
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.alone  # limits of seconds

LIMIT_SECONDS = 0.8
ENV = {"DEEPSPEED_WATCH_SECONDS": str(LIMIT_SECONDS)}


def _told(call: Callable[[], Any], name: str = "") -> tuple[str, float]:
    """The error of a call that cannot end, and how long it took; the process stays until all have it."""
    began = time.monotonic()
    with pytest.raises(CommError) as caught, watch.naming(name):
        call()
    return str(caught.value), time.monotonic() - began


def _different_calls(rank: int, _world_size: int) -> Any:
    current_world()
    watch.set_step(3)
    comm.all_reduce(torch.ones(8))
    values = torch.ones(64)
    if rank == 0:
        return _told(lambda: comm.all_reduce(values), "module 'h.3', reduce")
    return _told(lambda: comm.broadcast(values, 0), "module 'head', gather")


def test_ranks_in_different_calls_are_told_both_calls_modules_and_the_step() -> None:
    for rank, (text, seconds) in enumerate(run_ranks(_different_calls, 2, env=ENV)):
        assert f"rank {rank}: ranks do different things: as call 2 of their group" in text
        assert "rank 0 made all_reduce of 256 bytes (module 'h.3', reduce)" in text
        assert "rank 1 broadcast of 256 bytes (module 'head', gather)" in text
        assert "step 3" in text
        assert "test_watch.py" in text, "the place in the caller's code"
        assert seconds < 10


def _different_sizes(rank: int, _world_size: int, is_async: bool) -> Any:
    """What gloo answers with SIGABRT on one rank, or with part of the values."""
    current_world()
    for _ in range(3):
        comm.broadcast(torch.ones(8), 0)
        comm.all_reduce(torch.ones(8))
    values = torch.ones(8 if rank else 64)

    def call() -> None:
        work = comm.broadcast(values, 0, async_op=is_async)
        if is_async:
            work.wait()

    return _told(call, "module 'a'" if rank else "module 'b'")


@pytest.mark.parametrize("is_async", [False, True])
def test_one_call_with_different_sizes_is_settled_before_gloo_meets_it(is_async: bool) -> None:
    for text, seconds in run_ranks(_different_sizes, 2, is_async, env=ENV):
        assert "rank 0 made broadcast of 256 bytes (module 'b'), but rank 1 broadcast of 32 bytes (module 'a')" in text
        assert seconds < 10


def _repeated(rank: int, world_size: int) -> Any:
    current_world()
    pair = comm.new_group([0, 1])
    asked = []
    for step in range(5):
        for numel in (3, 5, 3):
            comm.all_reduce(torch.ones(numel))
        comm.all_to_all_single(torch.empty(4 * world_size), torch.ones(4 * world_size))
        if rank < 2:
            comm.all_gather_into_tensor(torch.empty(2), torch.ones(1), group=pair)
        if step == 2:
            with pytest.raises(CommError, match="invalid output tensor"):
                comm.all_gather_into_tensor(torch.empty(4), torch.ones(4))  # refused: not counted
        asked.append(sum(channel.asked for channel in watch.WATCH.ledger._channels.values()))
    return asked


def test_ranks_agree_on_calls_that_are_new_and_ask_nothing_once_steps_repeat() -> None:
    for asked in run_ranks(_repeated, 3, env=ENV):
        assert asked[0] > 0
        assert asked[-1] == asked[-2], asked


def _different_order(rank: int, _world_size: int) -> Any:
    current_world()
    first, second = comm.new_group([0, 1]), comm.new_group([0, 1])
    values = torch.ones(4)
    groups = (first, second) if rank == 0 else (second, first)

    def both() -> None:
        for group in groups:
            comm.all_reduce(values, group=group)

    return _told(both, "experts" if rank else "dense")


def test_ranks_that_use_two_groups_in_different_order_are_told() -> None:
    for rank, (text, _) in enumerate(run_ranks(_different_order, 2, env=ENV)):
        assert f"rank {rank}: ranks wait for each other and can never go on" in text
        assert "rank 0 waits in all_reduce of 16 bytes (dense), call 1 of ranks [0, 1]" in text
        assert "rank 1 waits in all_reduce of 16 bytes (experts), call 1 of ranks [0, 1]" in text


def _one_more(rank: int, _world_size: int, is_async: bool) -> Any:
    """Rank 1 reduces once more than rank 0; both go on to a meeting of another group, as at the end of a step."""
    current_world()
    other = comm.new_group([0, 1])

    def reduce(name: str) -> None:
        with watch.naming(name):
            work = comm.all_reduce(torch.ones(4), async_op=is_async)
        if is_async:
            work.wait()

    def step() -> None:
        reduce("module 'body'")
        if rank == 1:
            reduce("module 'head'")
        comm.barrier(group=other)

    return _told(step)


@pytest.mark.parametrize("is_async", [False, True])
def test_one_call_too_many_is_settled_although_the_others_wait_elsewhere(is_async: bool) -> None:
    for text, seconds in run_ranks(_one_more, 2, is_async, env=ENV):
        assert "rank 1 waits in all_reduce of 16 bytes (module 'head'), call 2 of ranks [0, 1]" in text
        assert "rank 0 waits in barrier, call 1 of ranks [0, 1]" in text
        assert seconds < 10


def _slow(rank: int, _world_size: int) -> Any:
    current_world()
    values = torch.ones(4)
    if rank == 1:
        time.sleep(4 * LIMIT_SECONDS)
    comm.all_reduce(values)
    if rank == 0:
        time.sleep(4 * LIMIT_SECONDS)  # once more: a second meeting after the first is over
    work = comm.all_reduce(values, async_op=True)
    work.wait()
    objects: list[Any] = [None, None]
    comm.all_gather_object(objects, rank)
    return values.tolist(), objects


def test_a_rank_that_is_only_slow_is_waited_for() -> None:
    assert run_ranks(_slow, 2, env=ENV) == [([4.0] * 4, [0, 1])] * 2


def _beyond_the_timeout(rank: int, _world_size: int) -> Any:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=4))
    current_world()
    for _ in range(3):
        comm.all_reduce(torch.ones(2), group=group)
    if rank == 1:
        with watch.naming("module 'a'"):
            comm.all_reduce(torch.ones(2))
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline:
            time.sleep(0.1)
        return None
    comm.all_reduce(torch.ones(2))
    return _told(lambda: comm.all_reduce(torch.ones(2), group=group), "module 'b'")


def test_at_the_real_timeout_the_error_says_that_a_rank_is_not_in_a_collective_and_where_it_is() -> None:
    text, seconds = run_ranks(_beyond_the_timeout, 2, env=ENV)[0]
    assert "all_reduce (module 'b') failed on rank 0, in the group of ranks [0, 1]" in text
    assert "rank 1 is not in a collective, at test_watch.py" in text
    assert "in _beyond_the_timeout; its last call was all_reduce of 8 bytes (module 'a')" in text
    assert seconds > 3


def _opaque(rank: int, _world_size: int, kind: str) -> Any:
    current_world()
    other = 1 - rank
    values = torch.ones(4)
    if kind == "recv":
        return _told(lambda: comm.recv(values, other))
    if kind == "irecv":
        return _told(lambda: comm.irecv(values, other).wait())
    objects: list[Any] = [None, None]
    return _told(comm.barrier if rank else (lambda: comm.all_gather_object(objects, rank)))


@pytest.mark.parametrize(("kind", "operation"), [("recv", "recv"), ("irecv", "irecv"), ("objects", "all_gather_object")])
def test_calls_that_gloo_does_not_let_go_of_end_too(kind: str, operation: str) -> None:
    for text, _ in run_ranks(_opaque, 2, kind, env=ENV):
        assert f"waits in {operation}" in text


def _messages(rank: int, _world_size: int) -> Any:
    current_world()
    got, sent = torch.zeros(3), torch.full((3,), float(rank))
    if rank == 0:
        comm.send(sent, 1)
        assert comm.recv(got, 1) == 1
    else:
        time.sleep(2 * LIMIT_SECONDS)
        assert comm.recv(got, None) == 0
        comm.isend(sent, 0).wait()
    ends = [comm.P2POp(comm.isend, sent, 1 - rank), comm.P2POp(comm.irecv, got, 1 - rank)]
    for work in comm.batch_isend_irecv(ends):
        work.wait()
    return got.tolist()


def test_messages_arrive_while_the_watch_is_on() -> None:
    assert run_ranks(_messages, 2, env=ENV) == [[1.0] * 3, [0.0] * 3]


def _without_the_back_end(rank: int, _world_size: int) -> Any:
    """Rank 0 waits in shared memory for rank 1, which waits in the back end for rank 0."""
    current_world()
    if rank == 1:
        return _told(lambda: comm.all_reduce(torch.ones(1)), "norm")

    def wait() -> None:
        began = time.monotonic()
        while (waited := time.monotonic() - began) < 20:
            time.sleep(0.1)
            watch.late("mean of gradients [0, 64)", [1], waited)

    return _told(wait, "bucket 2")


def test_a_wait_in_shared_memory_takes_part() -> None:
    for text, _ in run_ranks(_without_the_back_end, 2, env=ENV):
        assert "rank 0 waits in mean of gradients [0, 64) (bucket 2) for rank(s) [1]" in text
        assert "rank 1 waits in all_reduce of 4 bytes (norm), call 1" in text


def _shared_buckets(rank: int, _world_size: int) -> Any:
    """Rank 0 reduces one bucket more, in shared memory; rank 1 goes on to the norm, through the back end."""
    current_world()
    reducer = flat_all_reducer(64, torch.float32)
    reducer.launch(0, 32).wait()
    if rank == 1:
        return _told(lambda: comm.all_reduce(torch.ones(1)), "norm")
    return _told(lambda: reducer.launch(32, 64).wait(), "bucket 1")


def test_a_bucket_too_many_in_shared_memory_is_settled_on_both_sides() -> None:
    for text, seconds in run_ranks(_shared_buckets, 2, env=ENV):
        assert (
            "rank 0 waits in the mean of gradient elements [32, 64) of 64, to launch it (bucket 1) for rank(s) [1]" in text
        )
        assert "rank 1 waits in all_reduce of 4 bytes (norm), call" in text
        assert seconds < 10


def _slow_at_a_new_call(rank: int, _world_size: int) -> list[float]:
    current_world()
    if rank == 1:
        time.sleep(3 * LIMIT_SECONDS)
    values = torch.ones(2)
    comm.all_reduce(values)
    return values.tolist()


def test_a_new_call_waits_for_a_slow_rank() -> None:
    assert run_ranks(_slow_at_a_new_call, 2, env=ENV) == [[2.0, 2.0]] * 2


def _third_rank_elsewhere(rank: int, _world_size: int) -> Any:
    current_world()
    pair, other = comm.new_group([0, 1]), comm.new_group([1, 2])
    values = torch.ones(4)
    if rank == 0:
        return _told(lambda: comm.all_reduce(values, group=pair), "expert 0")
    if rank == 1:
        return _told(lambda: comm.reduce(values, 0, group=pair), "expert 1")
    deadline = time.monotonic() + 20
    while not watch.WATCH.verdict and time.monotonic() < deadline:  # in user code
        time.sleep(0.05)
    return _told(lambda: comm.all_reduce(values, group=other))


def test_a_rank_in_user_code_is_settled_at_its_next_call() -> None:
    for text, _ in run_ranks(_third_rank_elsewhere, 3, env=ENV):
        assert "rank 0 made all_reduce of 16 bytes (expert 0), but rank 1 reduce of 16 bytes (expert 1)" in text
        assert "rank 2 is not in a collective" in text


def _ends_early(rank: int, _world_size: int) -> Any:
    current_world()
    with watch.naming("module 'last'"):
        comm.all_reduce(torch.ones(2))
    if rank == 1:
        comm.destroy_process_group()
        return None
    return _told(lambda: comm.all_reduce(torch.ones(2)))


def test_a_rank_that_ended_is_named_with_its_last_call() -> None:
    text, _ = run_ranks(_ends_early, 2, env=ENV)[0]
    assert "rank 1 has ended; its last call was all_reduce of 8 bytes (module 'last')" in text


def _one_verdict(rank: int, _world_size: int) -> Any:
    current_world()
    first, _ = _told(comm.barrier if rank else (lambda: comm.all_reduce(torch.ones(1))))
    again, seconds = _told(lambda: comm.all_reduce(torch.ones(1)))
    return first, again, seconds


def test_after_the_verdict_every_call_raises_it_at_once() -> None:
    for first, again, seconds in run_ranks(_one_verdict, 2, env=ENV):
        assert first == again
        assert seconds < 0.2


def _off(_rank: int, _world_size: int) -> Any:
    current_world()
    comm.all_reduce(torch.ones(1))
    return watch.WATCH.is_on, watch.WATCH.ledger.late_seconds()


def test_zero_seconds_switch_the_watch_off() -> None:
    assert run_ranks(_off, 2, env={"DEEPSPEED_WATCH_SECONDS": "0"}) == [(False, 0.0)] * 2


def _failed_work(rank: int, _world_size: int) -> tuple[str, float]:
    current_world()
    if rank == 1:
        first = watch.WATCH.tell_failure("rank 1: the disk is full.")
        return first, 0.0
    return _told(lambda: comm.all_reduce(torch.ones(4)))


def test_a_failure_that_one_rank_tells_ends_the_waits_of_all() -> None:
    for text, seconds in run_ranks(_failed_work, 3, env=ENV):
        assert text == "rank 1: the disk is full."
        assert seconds < 10


def _failed_messages(rank: int, _world_size: int) -> str:
    current_world()
    if rank == 1:
        watch.WATCH.tell_failure("rank 1: first.")
    text, _ = _told(lambda: comm.recv(torch.ones(4), 2 - rank))
    return watch.WATCH.tell_failure(f"rank {rank}: {text} second.")


def test_the_first_failure_is_the_one_that_counts_in_messages_too() -> None:
    assert run_ranks(_failed_messages, 3, env=ENV) == ["rank 1: first."] * 3
