"""Layouts at large world sizes, over torch's fake back end; values over real ranks are in tests/ranks/test_comm_mesh.py."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from deepspeed.comm.world import reset_world
from deepspeed.errors import ArgumentError, CommError, UsageError
from deepspeed.topology.mesh import AXES, ParallelMesh


@pytest.fixture(autouse=True)
def _accelerator_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    reset_world()


@pytest.fixture
def pretend() -> Callable[[int, int], None]:
    def start(rank: int, world_size: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    return start


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ranks of each process group that is made."""
    calls: list[list[int]] = []
    new_group = dist.new_group

    def remember(ranks: list[int], **options: object) -> object:
        calls.append(ranks)
        return new_group(ranks, **options)

    monkeypatch.setattr(dist, "new_group", remember)
    return calls


def test_plain_data_parallelism_makes_no_group(pretend: Callable[..., None], made: list[list[int]]) -> None:
    pretend(3, 8)
    mesh = ParallelMesh.build(8, 3)
    assert mesh.sizes == {"pipe": 1, "replica": 8, "shard": 1, "expert": 1, "sequence": 1, "tensor": 1}
    for group in (mesh.data_parallel, mesh.zero_group, mesh.axis("replica"), mesh.expert_data_parallel):
        assert group.group is dist.group.WORLD
        assert (group.size, group.rank, group.ranks) == (8, 3, tuple(range(8)))
    assert made == []


def test_an_axis_of_one_rank_gets_a_group_when_somebody_asks(pretend: Callable[..., None], made: list[list[int]]) -> None:
    pretend(3, 8)
    tensor = ParallelMesh.build().axis("tensor")
    assert (tensor.size, tensor.rank, tensor.ranks) == (1, 0, (3,))
    assert made == []
    assert dist.get_process_group_ranks(tensor.group) == [3]
    assert tensor.group is tensor.group
    assert made == [[3]]


def test_the_mesh_of_a_later_engine_makes_no_group_that_there_is(
    pretend: Callable[..., None], made: list[list[int]]
) -> None:
    pretend(3, 8)
    first = ParallelMesh.build(pipe=2, tensor=2)
    assert first.axis("expert").group is not None
    count = len(made)
    assert count > 0
    second = ParallelMesh.build(pipe=2, tensor=2)
    assert second.axis("tensor").group is first.axis("tensor").group
    assert second.axis("expert").group is first.axis("expert").group
    assert len(made) == count
    up, down = (second.group_along("pipe", use) for use in ("up", "down"))
    assert second.axis("pipe").group is not up is not down  # each for its own traffic
    assert first.group_along("pipe", "up") is up
    assert len(made) > count


def test_another_world_gets_groups_of_its_own(pretend: Callable[..., None], made: list[list[int]]) -> None:
    pretend(3, 8)
    ParallelMesh.build(tensor=2)
    count = len(made)
    dist.destroy_process_group()
    pretend(3, 8)
    ParallelMesh.build(tensor=2)
    assert len(made) == 2 * count


def test_in_a_world_of_one_every_axis_is_the_world(pretend: Callable[..., None], made: list[list[int]]) -> None:
    pretend(0, 1)
    mesh = ParallelMesh.build()
    assert all(mesh.axis(name).group is dist.group.WORLD for name in AXES)
    assert made == []


def test_a_copied_module_speaks_to_the_same_ranks(pretend: Callable[..., None]) -> None:
    pretend(0, 2)
    axis = ParallelMesh.build().data_parallel
    assert copy.deepcopy({"axis": axis})["axis"] is axis


def test_axes_over_the_same_ranks_share_one_group(pretend: Callable[..., None], made: list[list[int]]) -> None:
    pretend(5, 8)
    mesh = ParallelMesh.build(shard=4, tensor=2)
    assert mesh.axis("shard").ranks == mesh.data_parallel.ranks == (1, 3, 5, 7)
    assert mesh.axis("shard").group is mesh.data_parallel.group is mesh.zero_group.group
    assert mesh.axis("tensor").ranks == (4, 5)
    assert made == [[0, 2, 4, 6], [1, 3, 5, 7], [0, 1], [2, 3], [4, 5], [6, 7]]


def test_the_named_groups_are_products_of_axes(pretend: Callable[..., None]) -> None:
    pretend(0, 64)
    mesh = ParallelMesh.build(pipe=2, shard=2, expert=2, sequence=2, tensor=2)
    assert mesh.sizes["replica"] == 2
    assert mesh.data_parallel.size == 8
    assert mesh.expert_data_parallel.size == 4
    assert mesh.zero_group.size == 16
    assert mesh.axis("pipe").ranks == (0, 32)
    assert set(mesh.expert_data_parallel.ranks) < set(mesh.data_parallel.ranks) < set(mesh.zero_group.ranks)


@pytest.mark.parametrize(
    ("is_slowest", "expert", "expert_data"), [(False, (6, 7), (1, 3, 5, 7)), (True, (3, 7), (4, 5, 6, 7))]
)
def test_experts_split_the_data_axis(
    pretend: Callable[..., None], is_slowest: bool, expert: tuple[int, ...], expert_data: tuple[int, ...]
) -> None:
    pretend(7, 8)
    before = ParallelMesh.build()
    mesh = before.with_experts(2, is_slowest=is_slowest)
    assert mesh.sizes == {**before.sizes, "replica": 4, "expert": 2}
    assert mesh.axis("expert").ranks == mesh.pipe_expert.ranks == expert
    assert mesh.axis("replica").ranks == mesh.expert_data_parallel.ranks == expert_data
    assert mesh.data_parallel.group is mesh.zero_group.group is dist.group.WORLD


def test_experts_leave_the_groups_of_a_pipeline_as_they_are(pretend: Callable[..., None], made: list[list[int]]) -> None:
    pretend(5, 8)
    before = ParallelMesh.build(pipe=2)
    made.clear()
    mesh = before.with_experts(4)
    for one, other in ((mesh.axis("pipe"), before.axis("pipe")), (mesh.data_parallel, before.data_parallel)):
        assert one.group is other.group
    assert mesh.axis("expert").group is before.data_parallel.group
    assert mesh.expert_data_parallel.ranks == (5,)
    assert mesh.pipe_expert.group is dist.group.WORLD
    assert made == []  # every one of them was there


def test_experts_that_do_not_divide_the_data_ranks_are_refused(pretend: Callable[..., None]) -> None:
    pretend(0, 6)
    with pytest.raises(ArgumentError, match=r"experts over 4 ranks \(ep_size\) do not divide the 6 data-parallel ranks"):
        ParallelMesh.build().with_experts(4)


def test_a_thousand_ranks_know_their_places(pretend: Callable[..., None]) -> None:
    pretend(700, 1024)
    mesh = ParallelMesh.build(pipe=4, sequence=2, tensor=8)
    assert math.prod(mesh.sizes.values()) == 1024
    assert mesh.axis("tensor").ranks == tuple(range(696, 704))
    assert mesh.axis("tensor").rank == 4
    assert mesh.data_parallel.size == 16
    assert repr(mesh).startswith("ParallelMesh(rank 700 of 1024: pipe=4, replica=16")


def test_sizes_that_do_not_divide_the_world_are_refused_with_the_numbers(pretend: Callable[..., None]) -> None:
    pretend(0, 8)
    with pytest.raises(ArgumentError, match=r"pipe=3 x tensor=2 = 6 ranks .* world of 8 ranks.*--num_gpus 6 "):
        ParallelMesh.build(pipe=3, tensor=2)
    with pytest.raises(ArgumentError, match=r"mesh sizes \{'shard': 0\}"):
        ParallelMesh.build(shard=0)


def test_a_world_other_than_the_process_groups_is_refused(pretend: Callable[..., None]) -> None:
    pretend(0, 8)
    with pytest.raises(ArgumentError, match=r"world_size=4, rank=0, but the process group has world_size=8, rank=0"):
        ParallelMesh.build(4)


def test_an_unknown_axis_is_refused_with_the_names_there_are(pretend: Callable[..., None]) -> None:
    pretend(0, 1)
    with pytest.raises(ArgumentError, match="no axis 'data'; its axes are pipe, replica, shard, expert, sequence, tensor"):
        ParallelMesh.build().axis("data")


def test_without_a_process_group_the_cure_is_named() -> None:
    with pytest.raises(CommError, match=r"Call deepspeed.init_distributed\(\)"):
        ParallelMesh.build()


def test_an_mpu_whose_sizes_do_not_make_the_world_is_refused(pretend: Callable[..., None]) -> None:
    class Mpu:
        def get_data_parallel_world_size(self) -> int:
            return 3

        def get_model_parallel_world_size(self) -> int:
            return 2

    pretend(0, 8)
    with pytest.raises(UsageError, match=r"tensor=2 and 3 data-parallel ranks; over 8 ranks there should be 8/2"):
        ParallelMesh.from_mpu(Mpu())
