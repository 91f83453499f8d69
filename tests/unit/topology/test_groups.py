from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from deepspeed.comm.world import reset_world
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.topology import groups
from deepspeed.topology.mesh import ParallelMesh

ACCESSORS = [
    "get_data_parallel",
    "_get_data_parallel",
    "get_model_parallel",
    "_get_model_parallel",
    "get_tensor_model_parallel",
    "_get_sequence_parallel",
    "_get_sequence_data_parallel",
    "_get_expert_parallel",
    "_get_expert_data_parallel",
]


@pytest.fixture(autouse=True)
def _no_mesh_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    groups.reset()
    yield
    groups.reset()
    reset_world()


@pytest.fixture
def _rank_13_of_32() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=13, world_size=32)
    groups.set_current(ParallelMesh.build(expert=2, sequence=2, tensor=2))  # 4 replicas


@pytest.mark.parametrize("name", ACCESSORS)
def test_without_a_mesh_every_accessor_says_what_to_call(name: str) -> None:
    for what in ("group", "world_size", "rank"):
        with pytest.raises(UsageError, match=r"there are no parallel groups yet: deepspeed.initialize\(\)"):
            getattr(groups, f"{name}_{what}")()


@pytest.mark.usefixtures("_rank_13_of_32")
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("get_data_parallel", [1, 5, 9, 13, 17, 21, 25, 29]),
        ("get_model_parallel", [12, 13]),
        ("get_tensor_model_parallel", [12, 13]),
        ("_get_sequence_parallel", [13, 15]),
        ("_get_sequence_data_parallel", list(range(1, 32, 2))),
        ("_get_expert_parallel", [9, 13]),
        ("_get_expert_data_parallel", [5, 13, 21, 29]),
    ],
)
def test_each_accessor_answers_from_its_part_of_the_mesh(name: str, ranks: list[int]) -> None:
    assert dist.get_process_group_ranks(getattr(groups, f"{name}_group")()) == ranks
    assert getattr(groups, f"{name}_world_size")() == len(ranks)
    assert getattr(groups, f"{name}_rank")() == ranks.index(13)


@pytest.mark.usefixtures("_rank_13_of_32")
def test_tensor_parallel_place_can_be_overridden_and_given_back() -> None:
    assert groups.get_tensor_model_parallel_src_rank() == 12
    groups.set_tensor_model_parallel_world_size(8)
    groups.set_tensor_model_parallel_rank(0)
    assert groups.get_tensor_model_parallel_world_size() == groups.get_model_parallel_world_size() == 8
    assert groups.get_tensor_model_parallel_rank() == 0
    groups.set_tensor_model_parallel_world_size(None)
    groups.set_tensor_model_parallel_rank(None)
    assert groups.get_tensor_model_parallel_world_size() == 2
    assert groups.get_tensor_model_parallel_rank() == 1


@pytest.mark.usefixtures("_rank_13_of_32")
def test_expert_groups_go_by_the_size_of_the_expert_axis() -> None:
    assert groups._get_expert_parallel_world_size("ep_size_2") == 2
    with pytest.raises(ArgumentError, match=r"no expert group 'ep_size_4': .* over 2 ranks \('ep_size_2'\)"):
        groups._get_expert_data_parallel_group("ep_size_4")


@pytest.mark.usefixtures("_rank_13_of_32")
def test_the_latest_mesh_counts_until_it_is_forgotten() -> None:
    mesh = ParallelMesh.build()
    groups.set_current(mesh)
    assert groups.get_current() is mesh
    assert groups.has_current()
    assert groups.get_data_parallel_world_size() == 32
    groups.reset()
    assert not groups.has_current()
    with pytest.raises(UsageError):
        groups.get_current()


def test_initialize_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(UsageError, match=r"Give ep_size to deepspeed.moe.layer.MoE, give mpu to deepspeed.initialize"):
        groups.initialize(ep_size=2)
