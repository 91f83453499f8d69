"""The mesh over real gloo ranks: each group reaches exactly the ranks it names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.topology.mesh import AXES, AxisGroup, ParallelMesh
from tests.support.ranks import run_ranks


def _reached(group: AxisGroup) -> tuple[float, ...]:
    """Ranks that a gather over the group brings, which must be those it names."""
    gathered = torch.empty(group.size)
    comm.all_gather_into_tensor(gathered, torch.tensor([float(comm.get_rank())]), group=group.group)
    return tuple(gathered.tolist())


def _walk(rank: int, world_size: int, sizes: dict[str, int]) -> list[tuple[str, tuple[int, ...], tuple[float, ...]]]:
    expert = sizes.pop("with_experts", 0)
    mesh = ParallelMesh.build(world_size, rank, **sizes)
    if expert:
        mesh = mesh.with_experts(abs(expert), is_slowest=expert < 0)
    named = {
        **{name: mesh.axis(name) for name in AXES},
        "data": mesh.data_parallel,
        "zero": mesh.zero_group,
        "expert data": mesh.expert_data_parallel,
        "pipe expert": mesh.pipe_expert,
    }
    return [(name, group.ranks, _reached(group)) for name, group in named.items()]


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (2, {"shard": 2}),
        (4, {"tensor": 2}),
        (4, {"pipe": 2, "shard": 2}),
        (4, {"with_experts": 2}),
        (4, {"with_experts": -2}),
        (4, {"pipe": 2, "with_experts": 2}),
    ],
)
def test_every_group_reaches_the_ranks_it_names(world_size: int, sizes: dict[str, int]) -> None:
    for rank, walked in enumerate(run_ranks(_walk, world_size, sizes)):
        assert len(walked) == len(AXES) + 4
        for name, ranks, reached in walked:
            assert reached == ranks, name
            assert rank in ranks, name


class _Mpu:
    """A model-parallel unit with the given groups, asked as Megatron's and Ulysses' are."""

    def __init__(self, **groups: AxisGroup) -> None:
        for name, group in groups.items():
            setattr(self, f"get_{name}_group", lambda group=group: group.group)
            setattr(self, f"get_{name}_world_size", lambda group=group: group.size)


def _adopt_megatron(rank: int, world_size: int) -> tuple[Any, ...]:
    theirs = ParallelMesh.build(tensor=2)
    mpu = _Mpu(data_parallel=theirs.data_parallel, model_parallel=theirs.axis("tensor"))
    mesh = ParallelMesh.from_mpu(mpu)
    assert mesh.data_parallel.group is theirs.data_parallel.group
    assert mesh.axis("tensor").group is theirs.axis("tensor").group
    assert mesh.zero_group.ranks == mesh.axis("replica").ranks == mesh.data_parallel.ranks
    return mesh.sizes["tensor"], _reached(mesh.zero_group)


def test_groups_of_a_megatron_unit_are_taken_over() -> None:
    assert run_ranks(_adopt_megatron, 4) == [(2, (0.0, 2.0)), (2, (1.0, 3.0)), (2, (0.0, 2.0)), (2, (1.0, 3.0))]


def _adopt_ulysses(rank: int, world_size: int) -> tuple[Any, ...]:
    theirs = ParallelMesh.build(sequence=2)
    mesh = ParallelMesh.from_mpu(_Mpu(sequence_parallel=theirs.axis("sequence")))
    assert mesh.axis("sequence").group is theirs.axis("sequence").group
    return _reached(mesh.data_parallel), _reached(mesh.zero_group)


def test_a_ulysses_unit_that_knows_only_its_sequence_gets_the_other_groups_made() -> None:
    everybody = (0.0, 1.0, 2.0, 3.0)
    assert run_ranks(_adopt_ulysses, 4) == [((0.0, 2.0), everybody), ((1.0, 3.0), everybody)] * 2


def _adopt_strange_order(rank: int, world_size: int) -> str:
    strange = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]} if rank > 1 else {0: [0, 2], 1: [1, 3]}
    groups = {tuple(ranks): comm.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    ranks = strange[rank]
    mpu = _Mpu(sequence_parallel=AxisGroup(ranks, rank, groups[tuple(ranks)]))
    try:
        ParallelMesh.from_mpu(mpu)
    except UsageError as error:
        return str(error)
    return "accepted"


def _experts_of_a_strange_order(rank: int, world_size: int) -> str:
    groups = {tuple(ranks): comm.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    data, tensor = ((0, 1), (0, 2)) if rank == 0 else ((0, 1), (1, 3)) if rank == 1 else ((2, 3), (rank - 2, rank))
    mpu = _Mpu(
        data_parallel=AxisGroup(data, rank, groups[data]),
        sequence_data_parallel=AxisGroup(data, rank, groups[data]),
        model_parallel=AxisGroup(tensor, rank, groups[tensor]),
    )
    mesh = ParallelMesh.from_mpu(mpu)
    try:
        mesh.with_experts(2)
    except UsageError as error:
        return str(error)
    return "accepted"


def test_experts_over_a_unit_with_ranks_in_another_order_are_refused_on_every_rank() -> None:
    assert all(
        "the mpu lacks groups that would have to be made" in text for text in run_ranks(_experts_of_a_strange_order, 4)
    )


def test_a_unit_with_ranks_in_another_order_is_refused_on_every_rank_together() -> None:
    texts = run_ranks(_adopt_strange_order, 4)
    assert all("the mpu lacks groups that would have to be made" in text for text in texts)
    assert "{'sequence': [0, 2]}" in texts[0]
    assert "this rank's groups agree" in texts[3]
