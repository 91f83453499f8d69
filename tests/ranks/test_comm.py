"""Values of every collective over real gloo ranks, by plain arithmetic."""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed import comm
from deepspeed.comm.world import current_world
from deepspeed.errors import CommError
from tests.support.ranks import RanksFailed, run_ranks

SIZES = [1, 2, 3]


def _mine(rank: int) -> torch.Tensor:
    return torch.tensor([float(rank), 10.0 + rank])


def _reductions(rank: int, world_size: int) -> dict[str, Any]:
    total, largest, mean, later, quick = (_mine(rank) for _ in range(5))
    comm.all_reduce(total)
    comm.all_reduce(largest, comm.ReduceOp.MAX)
    comm.all_reduce(mean, op=comm.ReduceOp.AVG)
    comm.all_reduce(later, async_op=True).wait()
    comm.inference_all_reduce(quick)
    pair = [_mine(rank), torch.tensor([1.0])]
    comm.all_reduce_coalesced(pair)
    waited = [_mine(rank), torch.tensor([1.0])]
    comm.all_reduce_coalesced(waited, async_op=True).wait()
    at_last = _mine(rank)
    comm.reduce(at_last, world_size - 1)
    parts = torch.cat([_mine(rank) * (part + 1) for part in range(world_size)])
    shard, shard_fn, shard_list = (torch.empty(2) for _ in range(3))
    comm.reduce_scatter_tensor(shard, parts.clone())
    comm.reduce_scatter_fn(shard_fn, parts.clone())
    comm.reduce_scatter(shard_list, [part.clone() for part in parts.chunk(world_size)])
    return {
        "total": [total, later, quick, pair[0], waited[0]],
        "ones": [pair[1], waited[1]],
        "largest": largest,
        "mean": mean,
        "at_last": at_last,
        "shards": [shard, shard_fn, shard_list],
    }


@pytest.mark.parametrize("world_size", SIZES)
def test_reductions_give_the_sum_the_maximum_and_the_mean(world_size: int) -> None:
    total = sum((_mine(rank) for rank in range(world_size)), torch.zeros(2))
    results = run_ranks(_reductions, world_size)
    for rank, got in enumerate(results):
        assert all(torch.equal(one, total) for one in got["total"])
        assert all(one.item() == world_size for one in got["ones"])
        assert torch.equal(got["largest"], _mine(world_size - 1))
        torch.testing.assert_close(got["mean"], total / world_size, rtol=1e-6, atol=0)  # one rounding of a division
        assert all(torch.equal(one, total * (rank + 1)) for one in got["shards"])
    assert torch.equal(results[-1]["at_last"], total)


def _gathers(rank: int, world_size: int) -> dict[str, Any]:
    listed = [torch.empty(2) for _ in range(world_size)]
    comm.all_gather(listed, _mine(rank))
    outputs = [torch.empty(2 * world_size) for _ in range(4)]
    comm.all_gather_into_tensor(outputs[0], _mine(rank))
    comm.allgather_fn(outputs[1], _mine(rank))
    comm.all_gather_coalesced([outputs[2], outputs[3]], [_mine(rank), _mine(rank) + 100])
    at_first = [torch.empty(2) for _ in range(world_size)] if rank == 0 else None
    comm.gather(_mine(rank), at_first, dst=0)
    handed = torch.empty(2)
    comm.scatter(handed, [_mine(place) for place in range(world_size)] if rank == 0 else None, src=0)
    told = _mine(rank)
    comm.broadcast(told, world_size - 1)
    objects: list[Any] = [None] * world_size
    comm.all_gather_object(objects, {"rank": rank})
    message = [("from", rank)]
    comm.broadcast_object_list(message, src=world_size - 1)
    return {
        "listed": listed,
        "outputs": outputs,
        "at_first": at_first,
        "handed": handed,
        "told": told,
        "objects": objects,
        "message": message,
    }


@pytest.mark.parametrize("world_size", SIZES)
def test_gathers_and_broadcasts_bring_every_ranks_share(world_size: int) -> None:
    shares = [_mine(rank) for rank in range(world_size)]
    whole = torch.cat(shares)
    results = run_ranks(_gathers, world_size)
    for rank, got in enumerate(results):
        assert torch.equal(torch.cat(got["listed"]), whole)
        assert all(torch.equal(one, whole) for one in got["outputs"][:3])
        assert torch.equal(got["outputs"][3], whole + 100)
        assert torch.equal(got["handed"], shares[rank])
        assert torch.equal(got["told"], shares[-1])
        assert got["objects"] == [{"rank": place} for place in range(world_size)]
        assert got["message"] == [("from", world_size - 1)]
    assert torch.equal(torch.cat(results[0]["at_first"]), whole)


def _exchange(rank: int, world_size: int) -> dict[str, Any]:
    addressed = torch.tensor([100.0 * rank + place for place in range(world_size)])
    equal = torch.empty(world_size)
    comm.all_to_all_single(equal, addressed)
    listed = [torch.empty(1) for _ in range(world_size)]
    comm.all_to_all(listed, list(addressed.chunk(world_size)))
    mine = torch.full((world_size * (rank + 1),), float(rank))  # rank + 1 elements for everybody
    uneven = torch.empty(sum(place + 1 for place in range(world_size)))
    comm.all_to_all_single(uneven, mine, [place + 1 for place in range(world_size)], [rank + 1] * world_size)
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    received = torch.empty(2)
    ops = [comm.P2POp(comm.isend, _mine(rank), after), comm.P2POp(dist.irecv, received, before)]
    for work in comm.batch_isend_irecv(ops):
        work.wait()
    comm.barrier()
    comm.monitored_barrier(timeout=timedelta(seconds=20))
    return {"equal": equal, "listed": torch.cat(listed), "uneven": uneven, "received": received}


@pytest.mark.parametrize("world_size", [2, 3])
def test_exchanges_bring_what_was_addressed_to_each_rank(world_size: int) -> None:
    for rank, got in enumerate(run_ranks(_exchange, world_size)):
        expected = torch.tensor([100.0 * place + rank for place in range(world_size)])
        assert torch.equal(got["equal"], expected)
        assert torch.equal(got["listed"], expected)
        assert torch.equal(got["uneven"], torch.cat([torch.full((p + 1,), float(p)) for p in range(world_size)]))
        assert torch.equal(got["received"], _mine((rank - 1) % world_size))


def _messages(rank: int, world_size: int) -> list[float]:
    first, second = torch.empty(1), torch.empty(1)
    if rank == 0:
        comm.send(torch.tensor([5.0]), 1)
        comm.isend(torch.tensor([6.0]), dst=1, tag=3).wait()
        return []
    sender = comm.recv(first, src=None)
    comm.irecv(second, src=0, tag=3).wait()
    return [float(sender), first.item(), second.item()]


def test_messages_arrive_by_sender_and_tag() -> None:
    assert run_ranks(_messages, 2)[1] == [0.0, 5.0, 6.0]


def _log(rank: int, world_size: int) -> dict[str, Any]:
    comm.configure(enabled=True)
    ready = torch.empty(1)
    works = [comm.irecv(ready, src=1 - rank), comm.isend(torch.ones(1), dst=1 - rank)]  # waiting at once would hang
    for work in works:
        work.wait()
    comm.all_gather_into_tensor(torch.empty(8), torch.ones(4))
    comm.reduce_scatter_tensor(torch.empty(4), torch.ones(8))
    comm.all_gather([torch.empty(4), torch.empty(4)], torch.ones(4))
    comm.gather(torch.ones(4), [torch.empty(4), torch.empty(4)] if rank == 0 else None, dst=0)
    comm.all_to_all_single(torch.empty(8), torch.ones(8))
    if rank == 1:
        time.sleep(0.5)  # the straggler itself: not waiting for anything
    comm.all_reduce(torch.ones(4))
    summary = comm.log_summary(show_straggler=True, return_dict=True)
    assert summary is not None
    return summary


def test_the_log_tells_who_waited_for_a_straggler() -> None:
    first, second = run_ranks(_log, 2)
    of_parts = ["all_gather_into_tensor", "reduce_scatter_tensor", "all_gather", "gather", "all_to_all_single"]
    assert list(first) == ["irecv", "isend", *of_parts, "all_reduce"]
    for name in of_parts:  # 32 bytes in all; of each, a rank has half already
        figures = first[name][32]
        assert figures["count"] == 1
        assert figures["tput_avg_gbps"] == pytest.approx(32 * 8 / 1e6 / figures["total_latency_ms"])
        assert figures["busbw_avg_gbps"] == pytest.approx(figures["tput_avg_gbps"] / 2)
    assert first["all_reduce"][16]["straggler_ms"] > 250  # rank 1 came 500 ms late
    assert second["all_reduce"][16]["straggler_ms"] < 250
    assert first["all_reduce"][16]["min_latency_ms"] == second["all_reduce"][16]["min_latency_ms"]


def _straggler_lines(rank: int, world_size: int) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.extend(record.getMessage().splitlines())  # type: ignore[method-assign]
    logging.getLogger("DeepSpeed").addHandler(handler)
    comm.configure(enabled=True)
    half = comm.new_group([0, 1])
    for _ in range(3):
        if rank == 2:
            time.sleep(0.2)  # the straggler itself
        comm.all_reduce(torch.ones(4))
    if rank < 2:
        comm.all_reduce(torch.ones(8), group=half)
    if rank == 0:
        comm.send(torch.ones(1), dst=1)
    elif rank == 1:
        comm.recv(torch.ones(1), src=0)
    comm.log_summary(show_straggler=True)
    return lines


def test_the_first_rank_prints_who_waited_for_whom() -> None:
    """Ranks that made calls of their own beside (a pipeline's messages, smaller groups) compare what all made."""
    lines, *others = run_ranks(_straggler_lines, 3)
    assert others == [[], []]
    start = lines.index("who waited for whom: time beyond the fastest rank's, which came last")
    header, *rows = lines[start + 1 : start + 5]
    assert header.split() == ["rank", "in", "calls", "waited", "share", "came", "last", "in", "waited", "most", "for"]
    assert len({len(line[: line.index("rank 2")]) for line in rows[:2]} | {header.index("waited most")}) == 1  # aligned
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]
    assert all("rank 2 (" in row for row in rows[:2])
    assert rows[2].split()[-4:-1] == ["3", "of", "3"]
    assert lines[start + 5].startswith("the others waited most for rank 2: ")
    assert (
        lines[start + 6]
        == "not compared, since not all ranks made the same calls: all_reduce (32 B), recv (4 B), send (4 B)"
    )


def _join_by_variables(rank: int, world_size: int) -> tuple[Any, ...]:
    comm.init_distributed(timeout=timedelta(seconds=20))
    world = current_world()
    total = torch.ones(1)
    comm.all_reduce(total)
    comm.init_distributed()
    return comm.get_rank(), comm.get_world_size(), comm.get_local_rank(), world.timeout, total.item()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_meet_by_the_variables_of_a_launcher(world_size: int) -> None:
    expected = [(rank, world_size, rank, timedelta(seconds=20), world_size) for rank in range(world_size)]
    assert run_ranks(_join_by_variables, world_size, init=False) == expected


def _join_by_open_mpi(rank: int, world_size: int) -> tuple[Any, ...]:
    port = os.environ["MASTER_PORT"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    for name, value in (("RANK", rank), ("SIZE", world_size), ("LOCAL_RANK", rank), ("LOCAL_SIZE", world_size)):
        os.environ[f"OMPI_COMM_WORLD_{name}"] = str(value)
    comm.init_distributed(distributed_port=port, timeout=timedelta(seconds=20))
    total = torch.ones(1)
    comm.all_reduce(total)
    return current_world().placement.source, os.environ["RANK"], os.environ["LOCAL_RANK"], total.item()


def test_ranks_meet_by_the_variables_of_open_mpi_without_mpi4py() -> None:
    assert run_ranks(_join_by_open_mpi, 2, init=False) == [("Open MPI", str(rank), str(rank), 2.0) for rank in (0, 1)]


def _join_by_arguments(rank: int, world_size: int) -> float:
    place = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    comm.init_distributed("gloo", init_method=place, rank=rank, world_size=world_size, timeout=timedelta(seconds=20))
    total = torch.ones(1)
    comm.all_reduce(total)
    return total.item()


def test_ranks_meet_by_explicit_arguments() -> None:
    assert run_ranks(_join_by_arguments, 2, init=False) == [2.0, 2.0]


def _adopt(rank: int, world_size: int) -> tuple[int, int, int]:
    comm.init_distributed(dist_init_required=True)
    return comm.get_rank(), comm.get_world_size(), comm.get_local_rank()


def test_a_group_that_torch_started_is_adopted_with_its_places() -> None:
    assert run_ranks(_adopt, 3) == [(rank, 3, rank) for rank in range(3)]


def _wait_for_a_late_rank(rank: int, world_size: int) -> str:
    comm.init_distributed(timeout=timedelta(seconds=1))
    if rank == 1:
        time.sleep(3)  # the fault itself: a rank that comes too late
        return ""
    try:
        comm.all_reduce(torch.ones(1))
    except CommError as error:
        return str(error)
    return "no error"


def test_a_late_rank_is_an_error_that_names_collective_rank_and_group() -> None:
    text = run_ranks(_wait_for_a_late_rank, 2, init=False)[0]
    assert text.startswith("all_reduce failed on rank 0, in the group of ranks [0, 1]: ")
    assert "Timed out waiting 1000ms" in text
    assert "DEEPSPEED_TIMEOUT" in text


def _lose_a_rank(rank: int, world_size: int) -> None:
    comm.barrier()  # the other rank has met this one
    if rank == 1:
        os._exit(3)
    comm.broadcast(torch.ones(1), src=1)
    raise AssertionError("the dead rank went unnoticed")


def test_a_dead_rank_is_an_error_on_the_others() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_lose_a_rank, 2)
    survivor = next(failure for failure in caught.value.failures if failure.rank == 0)
    assert "CommError: broadcast failed on rank 0, in the group of ranks [0, 1]: " in survivor.text
