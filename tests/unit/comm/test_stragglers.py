"""Who waited for whom: logs of several ranks in one process, which speak through threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deepspeed.comm.recorder import CommsLogger
from deepspeed.comm.stragglers import Comparison, RankWaits, compare, waits_table


class _Room:
    """Where the ranks put down what they say."""

    def __init__(self, world_size: int) -> None:
        self.said: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=10)


class _Speech:
    def __init__(self, rank: int, room: _Room) -> None:
        self.rank, self.world_size, self._room = rank, len(room.said), room

    def gather(self, value: Any) -> list[Any]:
        self._room.said[self.rank] = value
        self._room.barrier.wait()
        said = list(self._room.said)
        self._room.barrier.wait()
        return said

    def least(self, values: Sequence[float]) -> list[float]:
        return [min(column) for column in zip(*self.gather(values), strict=True)]


def _compared(*logs: CommsLogger) -> list[Comparison]:
    room = _Room(len(logs))

    def one(rank: int) -> Comparison:
        log = logs[rank]
        partial = {key for key, sizes in log.world_sizes.items() if sizes != {len(logs)}}
        return compare(log.comms_dict, partial, _Speech(rank, room))

    with ThreadPoolExecutor(len(logs)) as pool:
        return list(pool.map(one, range(len(logs))))


def _log(*calls: tuple[str, int, float], world_size: int = 3) -> CommsLogger:
    log = CommsLogger()
    for name, nbytes, milliseconds in calls:
        log.append(name, name, milliseconds, nbytes, world_size)
    return log


def test_the_rank_whose_call_was_shortest_came_last_and_the_others_waited_for_it() -> None:
    of_all = _compared(
        _log(("all_reduce", 8, 10.0), ("all_reduce", 8, 1.0), ("broadcast", 4, 7.0)),
        _log(("all_reduce", 8, 2.0), ("all_reduce", 8, 5.0), ("broadcast", 4, 3.0)),
        _log(("all_reduce", 8, 6.0), ("all_reduce", 8, 4.0), ("broadcast", 4, 9.0)),
    )
    for comparison in of_all:
        assert comparison == of_all[0]  # all ranks know the same
    assert of_all[0].least_ms == {("all_reduce", 8): 3.0, ("broadcast", 4): 3.0}
    assert of_all[0].waits == [
        RankWaits(0, 18.0, 12.0, 1, 1, 12.0),  # 8 + 4 for rank 1
        RankWaits(1, 10.0, 4.0, 2, 0, 4.0),
        RankWaits(2, 19.0, 13.0, 0, 1, 10.0),  # 4 + 6 for rank 1, 3 for rank 0
    ]
    assert (of_all[0].calls, of_all[0].left_out) == (3, [])


def test_calls_that_not_all_ranks_made_alike_are_left_out_and_named() -> None:
    first = _log(("all_reduce", 8, 2.0), ("isend", 4, 1.0), ("barrier", 0, 1.0), world_size=2)
    other = _log(("all_reduce", 8, 1.0), ("irecv", 4, 1.0), ("barrier", 0, 1.0), ("barrier", 0, 1.0), world_size=2)
    for log in (first, other):
        log.append("all_gather", "all_gather", 1.0, 16, 1)  # of a smaller group
    comparison = _compared(first, other)[0]
    assert comparison.least_ms == {("all_reduce", 8): 1.0}
    assert comparison.left_out == ["all_gather (16 B)", "barrier (0 B)", "irecv (4 B)", "isend (4 B)"]


def test_an_empty_log_is_no_error() -> None:
    comparison = _compared(CommsLogger(), CommsLogger())[0]
    assert (comparison.calls, comparison.least_ms) == (0, {})
    assert "nobody" in waits_table(comparison)


def test_the_table_names_the_straggler() -> None:
    waits = [RankWaits(0, 520.0, 510.0, 0, 1, 510.0), RankWaits(1, 10.0, 0.0, 12, 1, 0.0)]
    assert waits_table(Comparison({}, 12, waits, ["isend (4 B)"])).splitlines() == [
        "who waited for whom: time beyond the fastest rank's, which came last",
        "rank  in calls    waited  share  came last in  waited most for",
        "   0  520.0 ms  510.0 ms  98.1%       0 of 12  rank 1 (510.0 ms)",
        "   1   10.0 ms    0.0 ms   0.0%      12 of 12  nobody",
        "the others waited most for rank 1: 510.0 ms, added up over them",
        "not compared, since not all ranks made the same calls: isend (4 B)",
    ]
