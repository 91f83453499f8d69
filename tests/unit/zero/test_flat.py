"""Parameters and gradients as views: nothing moves that the user could notice, nothing is lost."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from deepspeed.zero.flat import FlatGroup, NamedParameter
from tests.support.fake_reducers import RecordingReducer


def group_of(module: nn.Module, dtype: torch.dtype = torch.float32, master: torch.dtype = torch.float32) -> FlatGroup:
    members = [NamedParameter(name, p, order) for order, (name, p) in enumerate(module.named_parameters())]
    flat = FlatGroup(members, group_index=0, param_dtype=dtype, master_dtype=master, bucket_numel=30)
    flat.attach_gradients(RecordingReducer(flat.layout.numel, dtype))
    return flat


def test_values_shapes_and_parameter_objects_stay() -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    before, objects = copy.deepcopy(module.state_dict()), list(module.parameters())
    flat = group_of(module)
    assert all(now is then for now, then in zip(module.parameters(), objects, strict=True))
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert storages == {flat.parameters_F.untyped_storage().data_ptr()}


def test_the_master_keeps_what_sixteen_bits_round_away() -> None:
    module = nn.Linear(7, 7)
    exact = module.weight.detach().clone()
    flat = group_of(module, torch.bfloat16)
    masters = {member.name: values for member, values in flat.named_slices(flat.master_F)}
    assert module.weight.dtype == torch.bfloat16
    assert torch.equal(masters["weight"], exact)
    assert torch.equal(module.weight, exact.bfloat16())


def test_autograd_accumulates_into_the_buffer_in_place() -> None:
    module = nn.Linear(3, 1, bias=False)
    flat = group_of(module)
    for _ in range(2):
        module(torch.ones(1, 3)).sum().backward()
    assert flat.gradients_F[:3].tolist() == [2.0, 2.0, 2.0]
    assert flat.gradients_F[3:].abs().sum() == 0


def test_a_gradient_that_the_user_replaced_is_the_truth() -> None:
    module = nn.Linear(3, 1, bias=False)
    flat = group_of(module)
    module(torch.ones(1, 3)).sum().backward()
    module.zero_grad()
    flat.collect()
    assert flat.gradients_F.abs().sum() == 0
    module.weight.grad = torch.full((1, 3), 4.0)
    flat.collect()
    assert flat.gradients_F[:3].tolist() == [4.0, 4.0, 4.0]
    module(torch.ones(1, 3)).sum().backward()
    assert flat.gradients_F[:3].tolist() == [5.0, 5.0, 5.0]


def test_another_accumulation_dtype_takes_gradients_over_and_drops_them() -> None:
    module = nn.Linear(3, 1, bias=False)
    members = [NamedParameter("weight", module.weight)]
    flat = FlatGroup(members, group_index=0, param_dtype=torch.bfloat16, master_dtype=torch.float32, bucket_numel=30)
    flat.attach_gradients(RecordingReducer(flat.layout.numel, torch.float32))
    for _ in range(2):
        module(torch.full((1, 3), 0.1, dtype=torch.bfloat16)).sum().backward()
        flat.collect()
        assert module.weight.grad is None
    once = torch.tensor(0.1, dtype=torch.bfloat16).float().item()
    assert flat.gradients_F[:3].tolist() == pytest.approx([2 * once] * 3, rel=1e-7)


def test_wrapping_a_parameter_again_releases_the_group_that_had_it() -> None:
    module = nn.Linear(3, 2)
    first = group_of(module)
    replaced = []
    first.on_replaced = lambda: replaced.append(True)
    value = module.weight.detach().clone()
    group_of(module)
    assert replaced
    assert torch.equal(module.weight, value)


def test_a_deep_copy_belongs_to_no_group() -> None:
    module = nn.Linear(3, 2)
    first = group_of(module)
    replaced = []
    first.on_replaced = lambda: replaced.append(True)
    group_of(copy.deepcopy(module))
    assert not replaced


def test_release_leaves_a_module_that_trains_on_by_itself() -> None:
    module = nn.Linear(3, 2)
    flat = group_of(module)
    reducer = flat.reducer
    flat.release()
    assert isinstance(reducer, RecordingReducer)
    assert reducer.is_closed
    module(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert module.weight.grad is not None
