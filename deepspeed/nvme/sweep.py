"""The settings that `ds_nvme_tune` tries, and which of them is best. Pure.

Called by `tune_command`. Does not live here: measuring.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed.errors import ArgumentError
from deepspeed.nvme.sizes import parse_nbytes, show_nbytes

__all__ = ["DEFAULT_SWEEP", "Point", "Speed", "aio_block", "best", "points_of", "read_sweep"]

DEFAULT_SWEEP: Mapping[str, Sequence[object]] = {
    "block_size": ["256K", "1M", "4M"],
    "queue_depth": [4, 16, 32],
    "io_parallel": [1, 2],
    "single_submit": [False, True],
    "sequential_requests": [False, True],
}
"""What is tried for each key where a sweep file does not say."""


@dataclass(frozen=True)
class Point:
    """One combination."""

    block_nbytes: int
    queue_depth: int
    threads: int
    single_submit: bool
    overlap_events: bool

    def __str__(self) -> str:
        extras = [name for name, on in (("single", self.single_submit), ("in turn", not self.overlap_events)) if on]
        return ", ".join(
            [f"block {show_nbytes(self.block_nbytes)}, depth {self.queue_depth}, threads {self.threads}", *extras]
        )


class Speed(NamedTuple):
    """GB/s at a point; None where that direction was not measured."""

    read: float | None
    write: float | None


def read_sweep(text: str) -> dict[str, Sequence[object]]:
    """Read a sweep file: a JSON object with lists for some of the keys of `DEFAULT_SWEEP`.

    Raises:
        ArgumentError: it is not one; the text says where.
    """
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentError(f"the sweep file is not JSON: {error}. Give an object such as {_EXAMPLE}.") from error
    if not isinstance(given, dict) or not all(isinstance(values, list) and values for values in given.values()):
        raise ArgumentError(f"the sweep file must be an object of lists that are not empty, such as {_EXAMPLE}.")
    unknown = [key for key in given if key not in DEFAULT_SWEEP]
    if unknown:
        raise ArgumentError(f"the sweep file has the key {unknown[0]!r}, but there are only {', '.join(DEFAULT_SWEEP)}.")
    return {**DEFAULT_SWEEP, **given}


_EXAMPLE = '{"block_size": ["1M", "8M"], "queue_depth": [8, 32]}'


def points_of(sweep: Mapping[str, Sequence[object]]) -> list[Point]:
    """All combinations, in an order without order, so that a disk that grows slower does not favour one corner.

    Raises:
        ArgumentError: a value is not one for its key.
    """
    points = [
        Point(
            parse_nbytes(_text(block)),
            _whole("queue_depth", depth),
            _whole("io_parallel", threads),
            _truth("single_submit", single),
            not _truth("sequential_requests", sequential),
        )
        for block, depth, threads, single, sequential in itertools.product(*(sweep[key] for key in DEFAULT_SWEEP))
    ]
    random.Random(0).shuffle(points)
    return points


def best(speeds: Mapping[Point, Speed], count: int) -> list[Point]:
    """The points that need the least time to read and write as much, the best first."""
    return sorted(speeds, key=lambda point: sum(1 / speed for speed in speeds[point] if speed is not None))[:count]


def aio_block(point: Point) -> str:
    """The block for a configuration file, as JSON."""
    block = {
        "block_size": point.block_nbytes,
        "queue_depth": point.queue_depth,
        "intra_op_parallelism": point.threads,
        "single_submit": point.single_submit,
        "overlap_events": point.overlap_events,
    }
    return json.dumps({"aio": block}, indent=2)


def _text(value: object) -> str:
    return value if isinstance(value, str) else str(_whole("block_size", value))


def _whole(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"the sweep has {key} {value!r}. Give whole numbers of at least 1.")
    return value


def _truth(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ArgumentError(f"the sweep has {key} {value!r}. Give true or false.")
    return value
