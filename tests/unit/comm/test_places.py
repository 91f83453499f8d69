from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from deepspeed import comm
from deepspeed.comm.world import reset_world


@pytest.fixture(autouse=True)
def _accelerator_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    reset_world()


@pytest.fixture
def _rank_5_of_8() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)


@pytest.mark.usefixtures("_rank_5_of_8")
def test_places_are_those_of_the_world_or_of_a_group() -> None:
    group = comm.new_group([1, 3, 5])
    assert (comm.get_rank(), comm.get_world_size()) == (5, 8)
    assert (comm.get_rank(group), comm.get_world_size(group)) == (2, 3)
    assert comm.get_all_ranks_from_group(group) == [1, 3, 5]
    assert comm.get_all_ranks_from_group() == list(range(8))
    assert comm.get_global_rank(group, 1) == 3
    assert comm.get_global_rank(None, 4) == 4
    assert comm.get_world_group() is dist.group.WORLD


@pytest.mark.usefixtures("_rank_5_of_8")
def test_an_unknown_local_rank_is_the_rank_modulo_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_SIZE", "4")
    assert comm.get_local_rank() == 1


@pytest.mark.usefixtures("_rank_5_of_8")
def test_a_torch_mesh_is_laid_over_all_ranks() -> None:
    mesh = comm.initialize_mesh_device((4, 2), ("data_parallel", "sequence_parallel"))
    assert mesh.device_type == "cpu"
    assert mesh.mesh_dim_names == ("data_parallel", "sequence_parallel")
    assert tuple(mesh.get_coordinate()) == (2, 1)


def test_a_new_group_keeps_the_timeout_of_the_world() -> None:
    comm.init_distributed(timeout=timedelta(seconds=11), verbose=False)
    for options, seconds in (({}, 11), ({"timeout": timedelta(seconds=5)}, 5)):
        group = comm.new_group([0], **options)
        backend = group._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "ask",
    [
        comm.get_rank,
        comm.get_world_size,
        comm.get_world_group,
        comm.get_all_ranks_from_group,
        comm.new_group,
        lambda: comm.initialize_mesh_device((1,), ("x",)),
    ],
)
def test_without_a_group_every_question_says_what_to_call(ask: object) -> None:
    with pytest.raises(AssertionError, match=r"Call deepspeed.init_distributed\(\)"):
        ask()  # type: ignore[operator]


def test_everything_that_torch_may_lack_is_there() -> None:
    assert comm.is_available()
    assert comm.has_all_gather_into_tensor()
    assert comm.has_reduce_scatter_tensor()
    assert comm.has_all_reduce_coalesced()
    assert comm.has_coalescing_manager()
    assert comm.TorchBackend.has_all_gather_into_tensor()
    assert comm.TorchBackend.get_all_gather_function() is comm.all_gather_into_tensor
