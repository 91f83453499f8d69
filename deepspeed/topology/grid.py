"""Where ranks stand in a grid of named axes: pure arithmetic, no torch, no processes.

Lives here: rank <-> coordinates, the ranks along an axis, and the grids that pipeline users name. Does not live here:
process groups (`mesh`, the main caller).

    axes (pipe, data), dims (2, 3):      data 0   data 1   data 2          the last axis varies fastest
                               pipe 0       0        1        2            ranks along data: [0, 1, 2] [3, 4, 5]
                               pipe 1       3        4        5            ranks along pipe: [0, 3] [1, 4] [2, 5]
"""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

from deepspeed.errors import ArgumentError

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology", "ranks_by_host"]


class ProcessTopology:
    """A grid of ranks.

    Nothing here is kept per rank: every answer is computed, so a grid of a million ranks costs as much as one of two.

    Args:
        axes: names, slowest-varying first.
        dims: size of each axis.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(dim < 1 for dim in dims):
            raise ArgumentError(
                f"axes={list(axes)}, dims={list(dims)}: every axis needs its own name and one size of at least 1."
            )
        self.axes = list(axes)
        self.dims = list(dims)
        self._strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
        self.ProcessCoord: Any = namedtuple("ProcessCoord", axes)  # type: ignore[misc]

    def world_size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.dims)

    def get_axis_names(self) -> list[str]:
        """Return the names, slowest-varying first."""
        return list(self.axes)

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis."""
        return self.dims[self._position(axis)]

    def get_rank(self, **coordinates: int) -> int:
        """Return the rank at a full set of coordinates, `get_rank(pipe=1, data=0)`.

        Raises:
            ArgumentError: an axis is missing, unknown, or its coordinate outside.
        """
        if set(coordinates) != set(self.axes):
            raise ArgumentError(f"get_rank got {sorted(coordinates)}; it needs one coordinate of each of {self.axes}.")
        return sum(
            self._checked(axis, coordinates[axis]) * stride for axis, stride in zip(self.axes, self._strides, strict=True)
        )

    def get_coord(self, rank: int) -> Any:
        """Return a rank's coordinates as a named tuple, `ProcessCoord(pipe=1, data=0)`."""
        if not 0 <= rank < self.world_size():
            raise ArgumentError(f"rank {rank} is outside the grid of {self.world_size()} ranks.")
        return self.ProcessCoord(*(rank // stride % dim for stride, dim in zip(self._strides, self.dims, strict=True)))

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return a rank's coordinates as text for file names, `"model_01"`; axes in `omit_axes` are left out."""
        coordinates = self.get_coord(rank)
        kept = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coordinates, axis):02d}" for axis in kept)

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks whose coordinate on `axis` is `idx`, in order."""
        return self.filter_match(**{axis: idx})

    def filter_match(self, **coordinates: int) -> list[int]:
        """Return the ranks that have all the given coordinates, in order."""
        unknown = [axis for axis in coordinates if axis not in self.axes]
        if unknown:
            self._position(unknown[0])
        choices = [
            [self._checked(axis, coordinates[axis])] if axis in coordinates else range(dim)
            for axis, dim in zip(self.axes, self.dims, strict=True)
        ]
        return [self._rank_at(point) for point in itertools.product(*choices)]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the lists of ranks that differ in `axis` alone; each rank is in one of them."""
        return self.groups_along((axis,))

    def groups_along(self, axes: Sequence[str]) -> list[list[int]]:
        """Return the lists of ranks that differ in `axes` alone; each rank is in one of them.

        The lists are ordered by their first rank, each list by rank.
        """
        fixed = [axis for axis in self.axes if axis not in {self.axes[self._position(axis)] for axis in axes}]
        points = itertools.product(*(range(self.get_dim(axis)) for axis in fixed))
        return [self.filter_match(**dict(zip(fixed, point, strict=True))) for point in points]

    def group_of(self, rank: int, axes: Sequence[str]) -> list[int]:
        """Return the ranks that differ from `rank` in `axes` alone, itself included, in order."""
        for axis in axes:
            self._position(axis)
        coordinates = self.get_coord(rank)._asdict()
        return self.filter_match(**{axis: at for axis, at in coordinates.items() if axis not in axes})

    def _rank_at(self, point: Sequence[int]) -> int:
        return sum(at * stride for at, stride in zip(point, self._strides, strict=True))

    def _position(self, axis: str) -> int:
        if axis not in self.axes:
            raise ArgumentError(f"the grid has no axis {axis!r}; its axes are {self.axes}.")
        return self.axes.index(axis)

    def _checked(self, axis: str, coordinate: int) -> int:
        if not 0 <= coordinate < self.get_dim(axis):
            raise ArgumentError(f"{axis}={coordinate} is outside the grid: {axis} goes from 0 to {self.get_dim(axis) - 1}.")
        return coordinate

    def __str__(self) -> str:
        return "x".join(f"{axis}={dim}" for axis, dim in zip(self.axes, self.dims, strict=True))


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages of data-parallel ranks: neighbours in rank share a stage, so gradients stay inside a host."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(("pipe", "data"), (num_pp, num_dp))


class PipeModelDataParallelTopology(ProcessTopology):
    """As above, with tensor-parallel ranks, which exchange most, nearest to each other."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(("pipe", "data", "model"), (num_pp, num_dp, num_mp))


def ranks_by_host(hosts: Sequence[str]) -> list[list[int]] | None:
    """The positions in `hosts` of each host, hosts in the order of their first.

    None where messages in two hops cannot be: they need several hosts with the same number of positions each, more than one,
    and the hosts in one order at the first, the second, ... position of each, because a group's order is that of its ranks.
    """
    by_host: dict[str, list[int]] = {}
    for position, host in enumerate(hosts):
        by_host.setdefault(host, []).append(position)
    found = list(by_host.values())
    has_places = len(found) > 1 and len(found[0]) > 1 and all(len(each) == len(found[0]) for each in found)
    return found if has_places and all(list(each) == sorted(each) for each in zip(*found, strict=True)) else None
