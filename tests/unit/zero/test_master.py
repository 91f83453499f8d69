"""The walk: the same numbers as the optimizer on the parameters, whatever the cut."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.ops.lamb import FusedLamb
from deepspeed.zero import master as master_module
from deepspeed.zero.flat import FlatGroup, NamedParameter
from deepspeed.zero.master import MasterWeights
from deepspeed.zero.state_io import carry_state, load_state, state_pieces, state_scalars
from tests.support.fake_reducers import RecordingReducer

OPTIMIZERS: dict[str, tuple[Any, bool]] = {
    "adamw": (functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.3), True),
    "sgd": (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True), True),
    "adagrad": (functools.partial(torch.optim.Adagrad, lr=0.1), True),
    "lamb": (functools.partial(FusedLamb, lr=0.1, weight_decay=0.3), False),
}


def walk_over(module: nn.Module, optimizer: Any, is_elementwise: bool, dtype: torch.dtype) -> MasterWeights:
    flats = []
    names = {id(p): (name, order) for order, (name, p) in enumerate(module.named_parameters())}
    for index, group in enumerate(optimizer.param_groups):
        members = [NamedParameter(names[id(p)][0], p, names[id(p)][1]) for p in group["params"]]
        flat = FlatGroup(members, group_index=index, param_dtype=dtype, master_dtype=torch.float32, bucket_numel=100)
        flat.attach_gradients(RecordingReducer(flat.layout.numel, dtype))
        flats.append(flat)
    history = {id(p): dict(state) for p, state in optimizer.state.items() if state}  # Adagrad comes with some
    walk = MasterWeights(flats, optimizer, is_elementwise=is_elementwise)
    carry_state(walk, history)
    return walk


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3))


def groups_of(module: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": list(module[0].parameters())}, {"params": list(module[1].parameters()), "lr": 0.02}]


def fill(walk: MasterWeights, seed: int) -> dict[str, torch.Tensor]:
    """Random gradients in the buffers; returned by name in fp32."""
    given = {}
    for number, flat in enumerate(walk.flats):
        generator = torch.Generator().manual_seed(seed * 10 + number)
        for member, grad in flat.named_slices(flat.gradients_F):
            grad.copy_(torch.randn(grad.shape, generator=generator))
            given[member.name] = grad.float().clone()
    return given


def values_of(walk: MasterWeights) -> dict[str, torch.Tensor]:
    return {m.name: v.clone() for flat in walk.flats for m, v in flat.named_slices(flat.master_F)}


@pytest.mark.parametrize("sub_group_numel", [16, 48, 1 << 19])
@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_walk_equals_the_optimizer_on_the_parameters(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, factor: float, sub_group_numel: int
) -> None:
    monkeypatch.setitem(master_module.SUB_GROUP_NUMEL, "cpu", sub_group_numel)
    make, is_elementwise = OPTIMIZERS[name]
    module, reference = net(), net()
    walk = walk_over(module, make(groups_of(module)), is_elementwise, dtype)
    plain = make(groups_of(reference))
    for seed in range(3):
        gradients = fill(walk, seed)
        walk.step(factor)
        for parameter_name, p in reference.named_parameters():
            p.grad = gradients[parameter_name] * factor
        plain.step()
        for flat in walk.flats:
            assert flat.gradients_F.abs().sum() == 0
    for parameter_name, p in reference.named_parameters():
        # Slices are other tensors for the same elementwise arithmetic; vector tails may fuse differently: one rounding.
        torch.testing.assert_close(values_of(walk)[parameter_name], p.detach(), rtol=1e-6, atol=1e-7)
    for parameter_name, p in module.named_parameters():
        assert torch.equal(p, values_of(walk)[parameter_name].to(dtype))


def test_between_steps_the_optimizer_shows_all_its_slices() -> None:
    module = net()
    walk = walk_over(module, torch.optim.AdamW(groups_of(module)), True, torch.bfloat16)
    fill(walk, 0)
    walk.step(0.5)
    shown = [p for group in walk.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in shown} == {id(s.param) for s in walk.slices}
    assert sum(p.numel() for p in shown) == sum(flat.layout.numel for flat in walk.flats)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_moves_by_name_into_another_cut(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make, is_elementwise = OPTIMIZERS[name]
    monkeypatch.setitem(master_module.SUB_GROUP_NUMEL, "cpu", 16)
    module = net()
    walk = walk_over(module, make(groups_of(module)), is_elementwise, torch.float32)
    fill(walk, 0)
    walk.step(1.0)
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    for piece in state_pieces(walk):
        whole = tensors.setdefault((piece.member.name, piece.key), torch.zeros(piece.member.param.numel()))
        whole[piece.start : piece.start + piece.values.numel()] = piece.values
    keys = lambda n: [key for owner, key in tensors if owner == n]  # noqa: E731

    monkeypatch.setitem(master_module.SUB_GROUP_NUMEL, "cpu", 1 << 19)
    other = net()
    second = walk_over(other, make(groups_of(other)), is_elementwise, torch.float32)
    with torch.no_grad():
        for (_, to), (_, frm) in zip(other.named_parameters(), module.named_parameters(), strict=True):
            to.copy_(frm)
    load_state(second, keys, lambda n, key, start, numel: tensors[n, key][start : start + numel], state_scalars(walk))
    fill(walk, 1)
    fill(second, 1)
    walk.step(1.0)
    second.step(1.0)
    for parameter_name, value in values_of(walk).items():
        torch.testing.assert_close(values_of(second)[parameter_name], value, rtol=1e-6, atol=1e-7)


def test_a_client_optimizer_with_history_keeps_it() -> None:
    module, reference = net(), net()
    make = functools.partial(torch.optim.Adam, lr=0.1)
    optimizer, plain = make(module.parameters()), make(reference.parameters())
    for m, o in ((module, optimizer), (reference, plain)):
        m(torch.ones(2, 5)).square().mean().backward()
        o.step()
        m.zero_grad()
    walk = walk_over(module, optimizer, True, torch.float32)
    module(torch.ones(2, 5)).square().mean().backward()
    walk.step(1.0)
    reference(torch.ones(2, 5)).square().mean().backward()
    plain.step()
    for parameter_name, p in reference.named_parameters():
        torch.testing.assert_close(values_of(walk)[parameter_name], p.detach(), rtol=1e-6, atol=1e-7)
