"""Parameters as views of a flat layout: nothing moves that the user could notice, nothing is lost, however many ranks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from deepspeed.comm.algorithms import LocalReducer
from deepspeed.errors import UsageError
from deepspeed.zero.flat import FlatGroup, owner_of, place_of
from deepspeed.zero.gradients import ViewGradients
from tests.support.fake_reducers import RecordingReducer
from tests.support.flat_groups import CPU, flat_group, lockstep_groups


def twins(world_size: int) -> list[nn.Module]:
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    return [copy.deepcopy(module) for _ in range(world_size)]


def masters(flat: FlatGroup) -> dict[str, Tensor]:
    """What this rank holds of each member, the rest NaN."""
    found = {}
    for position, slot in enumerate(flat.layout.slots):
        whole = torch.full((slot.numel,), torch.nan, dtype=flat.kind.master_dtype)
        for f in flat.own_parts(position):
            whole[f.param_start : f.param_start + f.numel] = flat.own_master(f.buffer_start, f.buffer_start + f.numel)
        found[flat.members[slot.index].name] = whole.view(flat.shapes[slot.index])
    return found


def joined(flats: list[FlatGroup]) -> dict[str, Tensor]:
    """What all ranks hold together; fails where none or two of them hold an element."""
    of_ranks = [masters(flat) for flat in flats]
    found = {}
    for name in of_ranks[0]:
        held = torch.stack([~of[name].isnan() for of in of_ranks]).sum(0)
        assert bool((held == 1).all()), name
        found[name] = torch.stack([of[name].nan_to_num() for of in of_ranks]).sum(0)
    return found


def test_values_shapes_and_parameter_objects_stay() -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    before, objects = copy.deepcopy(module.state_dict()), list(module.parameters())
    flat = flat_group(module)
    assert all(now is then for now, then in zip(module.parameters(), objects, strict=True))
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert storages == {flat.values.untyped_storage().data_ptr()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_together_hold_every_master_exactly_once(world_size: int, dtype: torch.dtype) -> None:
    modules = twins(world_size)
    exact = {name: value.clone() for name, value in modules[0].state_dict().items()}
    flats = lockstep_groups(modules, dtype=dtype)
    for name, value in joined(flats).items():
        assert torch.equal(value, exact[name])
    for module in modules:
        for name, param in module.named_parameters():
            assert param.dtype == dtype
            assert torch.equal(param, exact[name].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extents_cover_shard_space_and_show_the_values_that_the_model_has(dtype: torch.dtype) -> None:
    for flat in lockstep_groups(twins(3), dtype=dtype):
        assert [e.start for e in flat.extents] == [0, *[e.stop for e in flat.extents[:-1]]]
        assert flat.extents[-1].stop == flat.layout.shard_numel
        for position, slot in enumerate(flat.layout.slots):
            param = flat.members[slot.index].param
            for f in flat.own_parts(position):
                got = flat.own_values(f.buffer_start, f.buffer_start + f.numel)
                assert got.data_ptr() == param.data_ptr() + f.param_start * param.element_size()


def test_own_fragments_and_own_parts_say_the_same() -> None:
    for flat in lockstep_groups(twins(3)):
        by_parts = [f for position in range(len(flat.layout.slots)) for f in flat.own_parts(position)]
        assert list(flat.own_fragments()) == by_parts


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_written_parameter_is_whole_on_all_ranks_and_no_neighbour_changes(world_size: int, dtype: torch.dtype) -> None:
    modules = twins(world_size)
    flats = lockstep_groups(modules, dtype=dtype)
    before = joined(flats)
    position = next(i for i, slot in enumerate(flats[0].layout.slots) if flats[0].members[slot.index].name == "0.weight")
    value = torch.arange(15.0).view(5, 3) / 7
    for flat in flats:
        flat.write_parameter(position, value)
    after = joined(flats)
    assert torch.equal(after.pop("0.weight"), value)
    before.pop("0.weight")
    for name, master in after.items():
        assert torch.equal(master, before[name])
    for module, flat in zip(modules, flats, strict=True):
        assert torch.equal(module.get_parameter("0.weight"), value.to(dtype))
        flat.adopt_edits()  # the write itself is no edit: the masters keep what 16 bits round away
    assert torch.equal(joined(flats)["0.weight"], value)


# -- edits between updates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_edits_of_some_elements_go_into_the_master_and_the_others_keep_their_digits(world_size: int) -> None:
    modules = twins(world_size)
    exact = modules[0].get_parameter("0.weight").detach().clone()
    flats = lockstep_groups(modules, dtype=torch.bfloat16)
    for module, flat in zip(modules, flats, strict=True):
        with torch.no_grad():
            module.get_parameter("0.weight")[1] = 0.3
        flat.adopt_edits()
    got = joined(flats)["0.weight"]
    assert torch.equal(got[1], torch.full((3,), 0.3).bfloat16().float())
    assert torch.equal(got[[0, 2, 3, 4]], exact[[0, 2, 3, 4]])


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loaded_state_dict_becomes_the_master(world_size: int) -> None:
    modules = twins(world_size)
    flats = lockstep_groups(modules, dtype=torch.bfloat16)
    loaded = {name: torch.randn_like(value) for name, value in modules[0].state_dict().items()}
    for module, flat in zip(modules, flats, strict=True):
        module.load_state_dict(loaded)
        flat.adopt_edits()
    for name, value in joined(flats).items():
        assert torch.equal(value, loaded[name].float())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_given_other_storage_moves_back_with_its_new_values(world_size: int, dtype: torch.dtype) -> None:
    modules = twins(world_size)
    flats = lockstep_groups(modules, dtype=dtype)
    value = torch.randn(5, 3).to(dtype)
    for module, flat in zip(modules, flats, strict=True):
        module.get_parameter("0.weight").data = value.clone()
        flat.adopt_edits()
        storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
        assert storages == {flat.values.untyped_storage().data_ptr()}
        assert torch.equal(module.get_parameter("0.weight"), value)
        with torch.no_grad():
            module.get_parameter("0.weight").mul_(2)  # noticed too, now that it is back
        flat.adopt_edits()
    assert torch.equal(joined(flats)["0.weight"], (value * 2).float())


@pytest.mark.parametrize("converted", [torch.zeros(5, 3, dtype=torch.float64), torch.zeros(5, 4)], ids=["dtype", "size"])
def test_storage_of_another_kind_is_refused_with_the_name(converted: Tensor) -> None:
    module = twins(1)[0]
    flat = flat_group(module)
    module.get_parameter("0.weight").data = converted
    with pytest.raises(UsageError, match=r"(?s)'0\.weight'.*before initialize"):
        flat.adopt_edits()


def test_adopting_all_takes_what_no_version_counter_shows() -> None:
    module = twins(1)[0]
    flat = flat_group(module, dtype=torch.bfloat16)
    module.get_parameter("0.weight").data.fill_(0.5)  # through .data: not counted
    flat.adopt_edits()
    assert not torch.equal(masters(flat)["0.weight"], torch.full((5, 3), 0.5))
    flat.adopt_all()
    assert torch.equal(masters(flat)["0.weight"], torch.full((5, 3), 0.5))


# -- masters back to the model ----------------------------------------------------------------------------------------


def test_written_back_masters_reach_every_rank_when_gathered() -> None:
    modules = twins(2)
    flats = lockstep_groups(modules, dtype=torch.bfloat16)
    for flat in flats:
        with flat.rewriting():
            for extent in flat.extents:
                flat.own_master(extent.start, extent.stop).fill_(0.125 * (1 + flat.axis.rank))
            flat.write_back_all()
    for works in [flat.gather_whole() for flat in flats]:
        for work in works:
            work.wait()
    assert joined(flats).keys() == dict(modules[0].named_parameters()).keys()
    for name, value in joined(flats).items():
        for module in modules:
            assert torch.equal(module.get_parameter(name), value.bfloat16())


# -- owners -----------------------------------------------------------------------------------------------------------


def test_wrapping_a_parameter_again_releases_the_group_that_had_it() -> None:
    module = nn.Linear(3, 2)
    first = flat_group(module)
    replaced = []
    first.on_replaced = lambda: replaced.append(True)
    value = module.weight.detach().clone()
    second = flat_group(module)
    assert replaced
    assert torch.equal(module.weight, value)
    assert owner_of(module.weight) is second


def test_a_copy_of_a_parameter_belongs_to_no_group() -> None:
    module = nn.Linear(3, 2)
    first = flat_group(module)
    replaced = []
    first.on_replaced = lambda: replaced.append(True)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    for each in copies:
        assert place_of(each.weight) is None
        flat_group(each)
    assert not replaced


def test_release_leaves_a_module_that_trains_on_by_itself() -> None:
    module = nn.Linear(3, 2)
    flat = flat_group(module)
    reducer = RecordingReducer(flat.layout.numel)
    flat.attach_gradients(ViewGradients(flat, reducer))
    flat.release()
    assert reducer.is_closed
    assert owner_of(module.weight) is None
    assert module.weight.grad is None
    module(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert module.weight.grad is not None


def test_a_released_group_leaves_alone_what_a_newer_one_holds() -> None:
    module = nn.Linear(3, 2)
    first = flat_group(module)
    first.on_replaced = lambda: None
    second = flat_group(module)
    second.attach_gradients(ViewGradients(second, LocalReducer(second.layout.numel, torch.float32, CPU)))
    first.release()
    assert owner_of(module.weight) is second
    assert module.weight.grad is not None


def test_parameters_without_elements_live_in_a_group_like_all_others() -> None:
    module = nn.ParameterDict({"empty": nn.Parameter(torch.zeros(0, 4)), "full": nn.Parameter(torch.ones(3))})
    for dtype in (torch.float32, torch.bfloat16):
        for flat in lockstep_groups([copy.deepcopy(module), copy.deepcopy(module)], dtype=dtype):
            flat.adopt_edits()
            flat.adopt_all()
            assert [tuple(member.param.shape) for member in flat.members] == [(0, 4), (3,)]


def test_a_model_of_empty_parameters_alone_has_an_empty_layout() -> None:
    module = nn.ParameterDict({"empty": nn.Parameter(torch.zeros(0, 4))})
    flat = flat_group(module)
    assert flat.layout.numel == 0
    assert list(flat.own_fragments()) == []
    assert place_of(module["empty"]) == (flat, 0)
