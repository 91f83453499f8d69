from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import ArgumentError
from deepspeed.topology.grid import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
    ranks_by_host,
)

_dims = st.lists(st.integers(1, 4), min_size=1, max_size=5)


def _grid(dims: list[int]) -> ProcessTopology:
    return ProcessTopology([f"axis{i}" for i in range(len(dims))], dims)


@given(dims=_dims)
def test_every_rank_has_its_own_coordinates_and_they_lead_back(dims: list[int]) -> None:
    grid = _grid(dims)
    coordinates = [grid.get_coord(rank) for rank in range(grid.world_size())]
    assert len(set(coordinates)) == grid.world_size() == math.prod(dims)
    assert [grid.get_rank(**at._asdict()) for at in coordinates] == list(range(grid.world_size()))


@given(dims=_dims)
def test_the_last_axis_varies_fastest(dims: list[int]) -> None:
    grid = _grid(dims)
    assert [grid.get_coord(rank) for rank in range(grid.world_size())] == sorted(
        grid.get_coord(rank) for rank in range(grid.world_size())
    )


@given(dims=_dims, data=st.data())
def test_the_groups_along_any_axes_cover_each_rank_once(dims: list[int], data: st.DataObject) -> None:
    grid = _grid(dims)
    axes = data.draw(st.lists(st.sampled_from(grid.axes), unique=True))
    groups = grid.groups_along(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size()))
    for group in groups:
        assert len(group) == math.prod(grid.get_dim(axis) for axis in axes)
        assert group == sorted(group)
        assert all(grid.group_of(rank, axes) == group for rank in group)
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)


@given(dims=_dims, data=st.data())
def test_filtering_agrees_with_looking_at_every_rank(dims: list[int], data: st.DataObject) -> None:
    grid = _grid(dims)
    axes = data.draw(st.lists(st.sampled_from(grid.axes), unique=True))
    wanted = {axis: data.draw(st.integers(0, grid.get_dim(axis) - 1)) for axis in axes}
    assert grid.filter_match(**wanted) == [
        rank
        for rank in range(grid.world_size())
        if all(getattr(grid.get_coord(rank), axis) == at for axis, at in wanted.items())
    ]


def test_the_three_axis_grid_has_the_documented_groups() -> None:
    grid = PipeModelDataParallelTopology(2, 2, 2)
    assert grid.get_axis_names() == ["pipe", "data", "model"]
    assert grid.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.get_rank_repr(3) == "model_01"
    assert grid.get_axis_list("pipe", 1) == [4, 5, 6, 7]
    assert str(grid) == "pipe=2xdata=2xmodel=2"


def test_the_two_axis_grid_has_the_documented_groups() -> None:
    grid = PipeDataParallelTopology(2, 2)
    assert grid.get_axis_comm_lists("data") == [[0, 1], [2, 3]]
    assert grid.get_axis_comm_lists("pipe") == [[0, 2], [1, 3]]
    assert grid.get_rank_repr(1) == ""


def test_coordinates_can_be_written_for_file_names() -> None:
    grid = ProcessTopology(("pipe", "data", "model"), (2, 1, 12))
    assert grid.get_rank_repr(23) == "model_11"
    assert grid.get_rank_repr(13, omit_axes=["data"]) == "pipe_01-model_01"
    assert grid.get_rank_repr(13, omit_axes=(), inner_sep="=", outer_sep=",") == "pipe=01,data=00,model=01"


def test_a_million_ranks_cost_no_more_than_what_is_asked() -> None:
    grid = ProcessTopology(("pipe", "data", "model"), (100, 1000, 10))
    assert grid.group_of(123_456, ("model",)) == list(range(123_450, 123_460))
    assert grid.get_coord(123_456) == (12, 345, 6)


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda g: g.get_dim("model"), r"no axis 'model'; its axes are \['pipe', 'data'\]"),
        (lambda g: g.get_axis_comm_lists("model"), "no axis 'model'"),
        (lambda g: g.group_of(0, ("model",)), "no axis 'model'"),
        (lambda g: g.filter_match(model=0), "no axis 'model'"),
        (lambda g: g.get_rank(pipe=0), "one coordinate of each of"),
        (lambda g: g.get_rank(pipe=0, data=3), "data=3 is outside the grid: data goes from 0 to 2"),
        (lambda g: g.get_axis_list("pipe", -1), "pipe=-1 is outside"),
        (lambda g: g.get_coord(6), "rank 6 is outside the grid of 6 ranks"),
    ],
)
def test_questions_outside_the_grid_say_what_there_is(ask: object, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        ask(PipeDataParallelTopology(2, 3))  # type: ignore[operator]


@pytest.mark.parametrize(("axes", "dims"), [(("a",), (1, 2)), (("a", "a"), (1, 2)), (("a",), (0,))])
def test_a_grid_needs_a_name_and_a_size_per_axis(axes: tuple[str, ...], dims: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="every axis needs its own name"):
        ProcessTopology(axes, dims)


def test_the_arithmetic_loads_no_torch() -> None:
    code = "import deepspeed.topology.grid, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("hosts", "by_host"),
    [
        ("aabb", [[0, 1], [2, 3]]),
        ("baba", [[0, 2], [1, 3]]),
        ("aaabbbccc", [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        ("aaaa", None),
        ("abcd", None),
        ("aaab", None),
        ("abcacb", None),
        ("", None),
    ],
)
def test_positions_by_host_are_told_where_hosts_are_alike(hosts: str, by_host: list[list[int]] | None) -> None:
    assert ranks_by_host(hosts) == by_host
