"""The ranks that share sequences: made once, asked for by name, handed to `deepspeed.initialize` as its `mpu`.

    initialize_sequence_parallel(2) over 4 ranks      sequence ranks 0 1 and 2 3, data ranks 0 2 and 1 3

Lives here: making the mesh, and its answers in the form of a model-parallel unit. Does not live here: the current mesh
(`topology.groups`). `sequence.hugging_face` and clients call this, by the door
`runtime.sequence_parallel.parallel_state_sp`.
"""

from __future__ import annotations

from deepspeed.comm import ProcessGroup
from deepspeed.topology import groups
from deepspeed.topology.mesh import AxisGroup, ParallelMesh

__all__ = [
    "SequenceParallelUnit",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_sequence_data_parallel_group",
    "get_sequence_data_parallel_rank",
    "get_sequence_data_parallel_world_size",
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "initialize_sequence_parallel",
]


class SequenceParallelUnit:
    """The groups of a mesh under the names that `mpu` objects use: `get_<name>_group`, `_world_size` and `_rank`.

    Names are sequence_parallel, data_parallel (other data), sequence_data_parallel (gradients are averaged over these) and
    model_parallel (tensors; this rank alone).
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        """Store the mesh."""
        self._sequence, self._data, self._both = mesh.axis("sequence"), mesh.data_parallel, mesh.zero_group
        self._tensor = mesh.axis("tensor")

    def get_sequence_parallel_group(self) -> ProcessGroup:
        """Return the ranks that share a sequence."""
        return self._sequence.group

    def get_sequence_parallel_world_size(self) -> int:
        """Return how many those of `get_sequence_parallel_group` are."""
        return self._sequence.size

    def get_sequence_parallel_rank(self) -> int:
        """Return this rank's place among them."""
        return self._sequence.rank

    def get_data_parallel_group(self) -> ProcessGroup:
        """Return the ranks that see other data."""
        return self._data.group

    def get_data_parallel_world_size(self) -> int:
        """Return how many those of `get_data_parallel_group` are."""
        return self._data.size

    def get_data_parallel_rank(self) -> int:
        """Return this rank's place among them."""
        return self._data.rank

    def get_sequence_data_parallel_group(self) -> ProcessGroup:
        """Return the ranks that gradients are averaged over."""
        return self._both.group

    def get_sequence_data_parallel_world_size(self) -> int:
        """Return how many those of `get_sequence_data_parallel_group` are."""
        return self._both.size

    def get_sequence_data_parallel_rank(self) -> int:
        """Return this rank's place among them."""
        return self._both.rank

    def get_model_parallel_group(self) -> ProcessGroup:
        """Return the ranks that share each matrix: this one alone, unless the mesh has tensor ranks."""
        return self._tensor.group

    def get_model_parallel_world_size(self) -> int:
        """Return how many those of `get_model_parallel_group` are."""
        return self._tensor.size

    def get_model_parallel_rank(self) -> int:
        """Return this rank's place among them."""
        return self._tensor.rank


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Let each `sequence_parallel_size` neighbouring ranks share sequences: make the groups, and the mesh the current one.

    Every rank of the world must call it. A current mesh with that many sequence ranks is kept.

    Raises:
        ArgumentError: the size does not divide the number of ranks.
        CommError: there is no process group.
    """
    if not groups.has_current() or groups.get_current().axis("sequence").size != sequence_parallel_size:
        groups.set_current(ParallelMesh.build(sequence=sequence_parallel_size))


def _axis(name: str) -> AxisGroup:
    return groups.get_current().axis(name)


def get_sequence_parallel_group() -> ProcessGroup:
    """Return the ranks that share a sequence."""
    return _axis("sequence").group


def get_sequence_parallel_world_size() -> int:
    """Return how many ranks share a sequence."""
    return _axis("sequence").size


def get_sequence_parallel_rank() -> int:
    """Return this rank's place among those."""
    return _axis("sequence").rank


def get_sequence_data_parallel_group() -> ProcessGroup:
    """Return the ranks that gradients are averaged over."""
    return groups.get_current().zero_group.group


def get_sequence_data_parallel_world_size() -> int:
    """Return how many ranks gradients are averaged over."""
    return groups.get_current().zero_group.size


def get_sequence_data_parallel_rank() -> int:
    """Return this rank's place among those."""
    return groups.get_current().zero_group.rank


def get_model_parallel_group() -> ProcessGroup:
    """Return the ranks that share each matrix."""
    return _axis("tensor").group


def get_model_parallel_world_size() -> int:
    """Return how many ranks share each matrix."""
    return _axis("tensor").size


def get_model_parallel_rank() -> int:
    """Return this rank's place among those."""
    return _axis("tensor").rank
