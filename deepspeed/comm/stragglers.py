"""Who waited for whom: the communications logs of all ranks, compared call by call.

    rank 0    [ 500.1 ][ 2.0 ]     ms of its calls         least of all ranks   [ 0.2 ][ 1.9 ]
    rank 1    [   0.2 ][ 1.9 ]                             came last            rank 1, rank 1

All ranks leave a collective together, so whose call took the least time came last, and what a call took beyond that went by
in waiting for that rank. An asynchronous call counts from its start to the end of its wait: there the same difference is how
much earlier the others began.

Only calls of all ranks can be compared: operations that some ranks made more often than others, or in smaller groups, are
left out, and named.

Lives here: the comparison. Does not live here: the log (`recorder`); `collectives.log_summary` hands in how ranks speak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from deepspeed.comm.recorder import Log
from deepspeed.common.memory import format_nbytes
from deepspeed.common.texts import aligned

__all__ = ["Comparison", "RankWaits", "Speech", "compare", "waits_table"]

Key = tuple[str, int]
"""Name of an operation, and bytes of its message."""


class Speech(Protocol):
    """How the ranks that compare speak to each other; every call is collective."""

    rank: int
    world_size: int

    def least(self, values: Sequence[float]) -> list[float]:
        """The smallest of all ranks, place by place."""

    def gather(self, value: Any) -> list[Any]:
        """What each rank gives."""


class RankWaits(NamedTuple):
    """What one rank's calls took beyond the fastest rank's."""

    rank: int
    total_ms: float
    """Of all of its calls that are compared."""
    waited_ms: float
    came_last: int
    """Calls in which the others waited for it."""
    most_for: int
    """The rank that it waited longest for; itself where it never waited."""
    most_for_ms: float


class Comparison(NamedTuple):
    """Of the logs of all ranks."""

    least_ms: Mapping[Key, float]
    """Operation and size -> sum over the calls of the fastest rank's time."""
    calls: int
    waits: Sequence[RankWaits]
    left_out: Sequence[str]


def compare(log: Log, partial: frozenset[Key] | set[Key], speech: Speech) -> Comparison:
    """Compare. Collective over all ranks.

    Args:
        log: of this rank.
        partial: entries of it with calls of smaller groups.
        speech: how ranks speak.
    """
    counts = {(name, nbytes): entry[0] for name, sizes in log.items() for nbytes, entry in sizes.items()}
    everyones: list[dict[Key, int]] = speech.gather({key: -1 if key in partial else n for key, n in counts.items()})
    common = [key for key, n in everyones[0].items() if n > 0 and all(other.get(key) == n for other in everyones)]
    least_ms: dict[Key, float] = {}
    waited = [0.0] * speech.world_size  # by the rank that was waited for
    total, came_last, calls = 0.0, 0, 0
    for name, nbytes in common:
        own: list[float] = log[name][nbytes][1]
        least = speech.least(own)
        last = speech.least(
            [speech.rank if mine <= best else speech.world_size for mine, best in zip(own, least, strict=True)]
        )
        for mine, best, who in zip(own, least, last, strict=True):
            waited[int(who)] += mine - best
            came_last += int(who) == speech.rank
        least_ms[name, nbytes] = sum(least)
        total, calls = total + sum(own), calls + len(own)
    most_for = max(range(speech.world_size), key=waited.__getitem__) if any(waited) else speech.rank
    of_rank = RankWaits(speech.rank, total, sum(waited), came_last, most_for, waited[most_for])
    left_out = sorted({key for each in everyones for key in each if key not in least_ms})
    shown = [f"{name} ({format_nbytes(nbytes)})" for name, nbytes in left_out]
    return Comparison(least_ms, calls, speech.gather(of_rank), shown)


def waits_table(comparison: Comparison) -> str:
    """Who waited for whom, a line per rank, and the sentence that it comes to."""
    rows = [("rank", "in calls", "waited", "share", "came last in", "waited most for")]
    for each in comparison.waits:
        share = each.waited_ms / each.total_ms if each.total_ms else 0.0
        most = f"rank {each.most_for} ({each.most_for_ms:.1f} ms)" if each.most_for != each.rank else "nobody"
        came = f"{each.came_last} of {comparison.calls}"
        rows.append((str(each.rank), f"{each.total_ms:.1f} ms", f"{each.waited_ms:.1f} ms", f"{share:.1%}", came, most))
    lines = ["who waited for whom: time beyond the fastest rank's, which came last", *aligned(rows, "rrrrrl")]
    lines += _verdict(comparison)
    if comparison.left_out:
        lines.append(f"not compared, since not all ranks made the same calls: {', '.join(comparison.left_out)}")
    return "\n".join(lines)


def _verdict(comparison: Comparison) -> list[str]:
    caused = [0.0] * len(comparison.waits)
    for each in comparison.waits:
        if each.most_for != each.rank:
            caused[each.most_for] += each.most_for_ms
    if not any(caused):
        return []
    straggler = max(range(len(caused)), key=caused.__getitem__)
    return [f"the others waited most for rank {straggler}: {caused[straggler]:.1f} ms, added up over them"]
