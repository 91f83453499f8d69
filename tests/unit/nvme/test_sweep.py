from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config.memory import AioConfig
from deepspeed.errors import ArgumentError
from deepspeed.nvme.sizes import parse_nbytes, show_nbytes
from deepspeed.nvme.sweep import DEFAULT_SWEEP, Point, Speed, aio_block, best, points_of, read_sweep


@given(st.integers(1, 1 << 50))
def test_sizes_are_read_back(nbytes: int) -> None:
    assert parse_nbytes(show_nbytes(nbytes)) == parse_nbytes(str(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"), [("400M", 400 << 20), ("1.5k", 1536), (" 2 GiB".replace(" ", ""), 2 << 30), ("7", 7), ("1kb", 1024)]
)
def test_sizes_have_units(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "M", "1.3", "1X", "1 000"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="is not a size"):
        parse_nbytes(text)


def test_a_sweep_tries_every_combination_once() -> None:
    points = points_of(DEFAULT_SWEEP)
    assert len(points) == len(set(points)) == 3 * 3 * 2 * 2 * 2
    assert {point.block_nbytes for point in points} == {256 << 10, 1 << 20, 4 << 20}
    assert points == points_of(DEFAULT_SWEEP)  # the same order each time, which is none of the corners
    assert points != sorted(points, key=str)


def test_a_sweep_file_replaces_the_keys_it_names() -> None:
    sweep = read_sweep('{"block_size": ["8M", 4096], "queue_depth": [2], "single_submit": [false]}')
    points = points_of({**sweep, "io_parallel": [3], "sequential_requests": [True]})
    assert set(points) == {Point(8 << 20, 2, 3, False, False), Point(4096, 2, 3, False, False)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be an object of lists"),
        ('{"queue_depth": []}', "must be an object of lists"),
        ('{"depth": [1]}', "has the key 'depth', but there are only block_size, queue_depth"),
    ],
)
def test_a_bad_sweep_file_is_refused_with_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        read_sweep(text)


@pytest.mark.parametrize(
    ("key", "value"), [("queue_depth", 0), ("io_parallel", "2"), ("single_submit", 1), ("block_size", 0)]
)
def test_a_bad_value_of_a_sweep_is_named(key: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"{key} {value!r}"):
        points_of({**DEFAULT_SWEEP, key: [value]})


def test_the_best_point_needs_the_least_time_for_both_directions() -> None:
    a, b, c = (Point(4096, depth, 1, False, True) for depth in (1, 2, 3))
    assert best({a: Speed(9.0, 1.0), b: Speed(3.0, 3.0), c: Speed(1.0, 1.0)}, 2) == [b, a]
    assert best({a: Speed(None, 1.0), b: Speed(None, 3.0)}, 1) == [b]


def test_the_block_to_paste_is_a_block_of_the_configuration() -> None:
    block = json.loads(aio_block(Point(1 << 20, 8, 2, True, False)))["aio"]
    config = AioConfig(**block)
    assert (config.block_size, config.queue_depth, config.intra_op_parallelism) == (1 << 20, 8, 2)
    assert (config.single_submit, config.overlap_events) == (True, False)
