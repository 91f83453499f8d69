"""`deepspeed.utils.groups`: questions about the current mesh, for code that was not handed one.

Lives here: the current mesh behind `set_current` and `get_current`, and the accessors that other libraries call. Our own
rooms take a `ParallelMesh` as an argument instead. `deepspeed.initialize` sets the mesh; `reset` forgets it (tests).

Names with a leading underscore are what integrations import (Ulysses, MoE), so they are as public as the others. A rank
is this process's position in the group of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from deepspeed.comm import ProcessGroup
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.topology.mesh import AxisGroup, ParallelMesh

__all__ = [
    "get_current",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "has_current",
    "initialize",
    "reset",
    "set_current",
    "set_tensor_model_parallel_rank",
    "set_tensor_model_parallel_world_size",
]


@dataclass
class _State:
    """What this process believes; all None before `deepspeed.initialize`."""

    mesh: ParallelMesh | None = None
    tensor_rank: int | None = None
    """Given by `set_tensor_model_parallel_rank`; wins over the mesh."""
    tensor_world_size: int | None = None
    """Given by `set_tensor_model_parallel_world_size`; wins over the mesh."""


_state = _State()


def set_current(mesh: ParallelMesh) -> None:
    """Make `mesh` the one that the accessors answer from; a later engine's mesh replaces an earlier one's."""
    _state.mesh = mesh


def has_current() -> bool:
    """Whether a mesh is set, so that `get_current` answers."""
    return _state.mesh is not None


def get_current() -> ParallelMesh:
    """Return the current mesh.

    Raises:
        UsageError: none is set yet.
    """
    if _state.mesh is None:
        raise UsageError(
            "there are no parallel groups yet: deepspeed.initialize() makes them. "
            "Call it before asking deepspeed.utils.groups, or set a mesh of your own with groups.set_current(mesh)."
        )
    return _state.mesh


def reset() -> None:
    """Forget the mesh and the tensor-parallel overrides; process groups are left alone."""
    _state.mesh = _state.tensor_rank = _state.tensor_world_size = None


def initialize(ep_size: int = 1, mpu: object | None = None) -> NoReturn:
    """Refuse: groups come with the model.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        f"groups.initialize(ep_size={ep_size}, ...) is gone: groups are made where they are needed. "
        "Give ep_size to deepspeed.moe.layer.MoE, give mpu to deepspeed.initialize, and delete this call."
    )


# -------------------------------------------------------------------- data parallel


def get_data_parallel_group() -> ProcessGroup:
    """Return the ranks that see different data and hold the same weights."""
    return get_current().data_parallel.group


def get_data_parallel_world_size() -> int:
    """Return how many ranks see different data."""
    return get_current().data_parallel.size


def get_data_parallel_rank() -> int:
    """Return this rank's place among those that see different data."""
    return get_current().data_parallel.rank


_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank


# -------------------------------------------------------------------- tensor (model) parallel


def get_tensor_model_parallel_group() -> ProcessGroup:
    """Return the ranks that share each matrix."""
    return get_current().axis("tensor").group


def get_tensor_model_parallel_world_size() -> int:
    """Return how many ranks share each matrix; `set_tensor_model_parallel_world_size` wins."""
    if _state.tensor_world_size is not None:
        return _state.tensor_world_size
    return get_current().axis("tensor").size


def get_tensor_model_parallel_rank() -> int:
    """Return this rank's place among those; `set_tensor_model_parallel_rank` wins."""
    return _state.tensor_rank if _state.tensor_rank is not None else get_current().axis("tensor").rank


def get_tensor_model_parallel_src_rank() -> int:
    """Return the global rank of the first of those."""
    return get_current().axis("tensor").ranks[0]


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Make the accessor return this number; None asks the mesh again. For building a model outside its own layout."""
    _state.tensor_world_size = world_size


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Make the accessor return this rank; None asks the mesh again. For building a model outside its own layout."""
    _state.tensor_rank = rank


get_model_parallel_group = _get_model_parallel_group = get_tensor_model_parallel_group
get_model_parallel_world_size = _get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank = _get_model_parallel_rank = get_tensor_model_parallel_rank


# -------------------------------------------------------------------- sequence parallel


def _get_sequence_parallel_group() -> ProcessGroup:
    """Return the ranks that share one sequence."""
    return get_current().axis("sequence").group


def _get_sequence_parallel_world_size() -> int:
    """Return how many ranks share one sequence."""
    return get_current().axis("sequence").size


def _get_sequence_parallel_rank() -> int:
    """Return this rank's place among those that share its sequence."""
    return get_current().axis("sequence").rank


def _get_sequence_data_parallel_group() -> ProcessGroup:
    """Return the ranks that gradients are averaged over: data-parallel x sequence."""
    return get_current().zero_group.group


def _get_sequence_data_parallel_world_size() -> int:
    """Return how many ranks gradients are averaged over."""
    return get_current().zero_group.size


def _get_sequence_data_parallel_rank() -> int:
    """Return this rank's place among those."""
    return get_current().zero_group.rank


# -------------------------------------------------------------------- expert parallel


def _expert_axis(group_name: str) -> AxisGroup:
    axis = get_current().axis("expert")
    if group_name not in ("", f"ep_size_{axis.size}"):
        raise ArgumentError(
            f"there is no expert group {group_name!r}: the mesh spreads experts over {axis.size} ranks "
            f"('ep_size_{axis.size}'). All MoE layers of a model use the mesh's expert axis."
        )
    return axis


def _get_expert_parallel_group(group_name: str = "") -> ProcessGroup:
    """Return the ranks that experts are spread over; `group_name` is `"ep_size_<n>"` as MoE layers name it."""
    return _expert_axis(group_name).group


def _get_expert_parallel_world_size(group_name: str = "") -> int:
    """Return how many ranks experts are spread over."""
    return _expert_axis(group_name).size


def _get_expert_parallel_rank(group_name: str = "") -> int:
    """Return this rank's place among those."""
    return _expert_axis(group_name).rank


def _get_expert_data_parallel_group(group_name: str = "") -> ProcessGroup:
    """Return the ranks that hold the same experts and see different data."""
    _expert_axis(group_name)
    return get_current().expert_data_parallel.group


def _get_expert_data_parallel_world_size(group_name: str = "") -> int:
    """Return how many ranks hold the same experts."""
    _expert_axis(group_name)
    return get_current().expert_data_parallel.size


def _get_expert_data_parallel_rank(group_name: str = "") -> int:
    """Return this rank's place among those."""
    _expert_axis(group_name)
    return get_current().expert_data_parallel.rank
