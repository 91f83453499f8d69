"""A pipeline's ranks under the names that Megatron-style code asks for.

Lives here: `PipelineParallelGrid`, the `mpu` of a pipeline, over a mesh. Does not live here: groups (`topology.mesh`) and
the arithmetic (`topology.grid`). `PipelineModule.mpu()` hands it out.
"""

from __future__ import annotations

from deepspeed import comm
from deepspeed.comm import ProcessGroup
from deepspeed.errors import PipelineError
from deepspeed.topology.grid import PipeDataParallelTopology, ProcessTopology
from deepspeed.topology.mesh import AxisGroup, ParallelMesh

__all__ = ["PipelineParallelGrid", "mesh_of"]

_AXES = ["pipe", "data", "model"]


def mesh_of(topology: ProcessTopology) -> ParallelMesh:
    """Lay the ranks out as `topology` says; every rank of the world must call it.

    Raises:
        PipelineError: it has other axes than pipe, data and model in this order, or another number of ranks than the world.
    """
    axes, world_size = topology.get_axis_names(), comm.get_world_size()
    if axes not in (_AXES, _AXES[:2]):
        raise PipelineError(
            f"the topology has the axes {axes}; a pipeline needs pipe, data and, optionally, model, slowest-varying first. "
            "Use PipeDataParallelTopology or PipeModelDataParallelTopology."
        )
    if topology.world_size() != world_size:
        raise PipelineError(
            f"the topology {topology} has {topology.world_size()} ranks, and {world_size} were started. "
            f"Start {topology.world_size()} ranks, or change a size."
        )
    return ParallelMesh.build(pipe=topology.get_dim("pipe"), tensor=topology.get_dim("model") if "model" in axes else 1)


class PipelineParallelGrid:
    """Where this rank stands among the pipeline's, and which groups it belongs to.

    `slice` and `tensor_model` are the ranks that share matrices; `model` are all ranks that hold one copy of the model
    together: every stage's slice; `pipe` and `pipeline_model` are the stages of one copy. A rank is the place in the group
    of that name.

    Args:
        topology: how the ranks are laid out; None makes one stage of all.
        process_group: accepted when it has all ranks of the world, like None.
        mesh: one that exists already; None makes it, which every rank of the world must do.

    Attributes:
        mesh: all ranks on named axes.
        is_first_stage, is_last_stage: whether this rank's stage is.
        model_parallel_size: ranks that share matrices, as `slice_parallel_size`: a name older than the groups of `model`.
    """

    def __init__(
        self,
        topology: ProcessTopology | None = None,
        process_group: ProcessGroup | None = None,
        mesh: ParallelMesh | None = None,
    ) -> None:
        if process_group is not None and comm.get_world_size(process_group) != comm.get_world_size():
            raise PipelineError(
                f"process_group has {comm.get_world_size(process_group)} of the world's {comm.get_world_size()} ranks; "
                "a pipeline spans all of them. Leave it out."
            )
        self._topo = topology or PipeDataParallelTopology(1, comm.get_world_size())
        self.mesh = mesh or mesh_of(self._topo)
        self.global_rank = self.mesh.rank
        self._pipe, self._slice = self.mesh.axis("pipe"), self.mesh.axis("tensor")
        self._data = self.mesh.data_parallel
        self._model = _model_group(self.mesh)
        self.world_size = self.mesh.world_size
        self.stage_id, self.data_parallel_id = self._pipe.rank, self._data.rank
        self.is_first_stage, self.is_last_stage = self._pipe.rank == 0, self._pipe.rank == self._pipe.size - 1
        self.pipe_parallel_size, self.data_parallel_size = self._pipe.size, self._data.size
        self.slice_parallel_size = self.model_parallel_size = self._slice.size

    def topology(self) -> ProcessTopology:
        """Return the layout of the ranks."""
        return self._topo

    def get_global_rank(self) -> int:
        """Return this process's rank in the world."""
        return self.global_rank

    def get_stage_id(self) -> int:
        """Return this rank's stage."""
        return self._pipe.rank

    def get_data_parallel_id(self) -> int:
        """Return which copy of the model this rank is part of."""
        return self._data.rank

    def stage_to_global(self, stage_id: int, **coordinates: int) -> int:
        """Return the rank of another stage with this rank's other coordinates, or those given (`data=0`, `model=1`)."""
        mine = self._topo.get_coord(self.global_rank)._asdict()
        return self._topo.get_rank(**{**mine, **coordinates, "pipe": stage_id})

    # -- ranks along the axes, in the words of Megatron ---------------------------------------------------------------

    def get_pipe_parallel_rank(self) -> int:
        """Return this rank's stage."""
        return self._pipe.rank

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self._pipe.size

    def get_pipe_parallel_group(self) -> ProcessGroup:
        """Return the ranks of one copy, one per stage."""
        return self._pipe.group

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group

    def get_data_parallel_rank(self) -> int:
        """Return which copy of the model this rank is part of."""
        return self._data.rank

    def get_data_parallel_world_size(self) -> int:
        """Return the number of copies of the model."""
        return self._data.size

    def get_data_parallel_group(self) -> ProcessGroup:
        """Return the ranks that hold the same layers and see different data."""
        return self._data.group

    def get_slice_parallel_rank(self) -> int:
        """Return this rank's place among those that share matrices."""
        return self._slice.rank

    def get_slice_parallel_world_size(self) -> int:
        """Return the number of ranks that share matrices."""
        return self._slice.size

    def get_slice_parallel_group(self) -> ProcessGroup:
        """Return the ranks that share matrices."""
        return self._slice.group

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group

    def get_model_parallel_rank(self) -> int:
        """Return this rank's place among those that hold one copy of the model."""
        return self._model.rank

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks that hold one copy of the model."""
        return self._model.size

    def get_model_parallel_group(self) -> ProcessGroup:
        """Return the ranks that hold one copy of the model."""
        return self._model.group


def _model_group(mesh: ParallelMesh) -> AxisGroup:
    """The ranks along pipe x tensor; a group is made where neither axis is all of it."""
    pipe, tensor = mesh.axis("pipe"), mesh.axis("tensor")
    if tensor.size == 1:
        return pipe
    if pipe.size == 1:
        return tensor
    grid = ProcessTopology(tuple(mesh.sizes), tuple(mesh.sizes.values()))
    if pipe.size * tensor.size == mesh.world_size:
        return AxisGroup(range(mesh.world_size), mesh.rank, comm.get_world_group())
    groups = {tuple(ranks): comm.kept_group(ranks) for ranks in grid.groups_along(("pipe", "tensor"))}
    mine = next(ranks for ranks in groups if mesh.rank in ranks)
    return AxisGroup(mine, mesh.rank, groups[mine])
