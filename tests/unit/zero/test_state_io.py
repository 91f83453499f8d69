"""Optimizer state by name: whole whatever slices and ranks it lies on, and back again into others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.errors import CheckpointError
from deepspeed.zero.master import MasterWeights
from deepspeed.zero.state_io import Scalars, agree_on_scalars, hand_back, load_state, state_of, state_pieces, state_scalars
from tests.support.flat_groups import lockstep_groups

SHAPES = {"a": (5, 3), "b": (4,), "empty": (0, 3), "scalar": (), "c": (40, 3)}
Maker = Callable[[Any], torch.optim.Optimizer]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def module() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    return nn.ParameterDict({name: nn.Parameter(torch.randn(s, generator=generator)) for name, s in SHAPES.items()})


def gradient_of(name: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + len(name) + ord(name[0]))
    return torch.randn(SHAPES[name], generator=generator)


def ranks(world_size: int, make: Maker = adam, *, is_elementwise: bool = True, sub_group: int = 32) -> list[MasterWeights]:
    """The masters of each rank, of optimizers that have not stepped."""
    modules = [module() for _ in range(world_size)]
    flats = lockstep_groups(modules, bucket_numel=64)
    return [
        MasterWeights([flat], make(list(m.parameters())), is_elementwise=is_elementwise, sub_group_numel=sub_group)
        for m, flat in zip(modules, flats, strict=True)
    ]


def step(master: MasterWeights, number: int) -> None:
    """What the walk does, without the exchange between ranks."""
    for s in master.slices:
        flat = torch.zeros(s.numel)
        for member, param_start, begin, numel in s.pieces():
            flat[begin : begin + numel] = gradient_of(member.name, number).view(-1)[param_start : param_start + numel]
        s.param.grad = flat.view(s.param.shape)
    master.optimizer.step()


def whole(masters: list[MasterWeights], parts: int = 1) -> dict[tuple[str, str], Tensor]:
    """State of all ranks put together; fails where an element comes twice or never."""
    found: dict[tuple[str, str], Tensor] = {}
    for master in masters:
        for part in range(parts):
            for piece in state_pieces(master, parts, part):
                key = (piece.member.name, piece.key)
                there = found.setdefault(key, torch.full((piece.shape.numel(),), torch.nan))
                target = there[piece.start : piece.start + piece.values.numel()]
                assert bool(target.isnan().all())
                target.copy_(piece.values)
    assert not any(bool(value.isnan().any()) for value in found.values())
    return {key: value.view(SHAPES[key[0]]) for key, value in found.items()}


def scalars_of(masters: list[MasterWeights]) -> Scalars:
    return {name: plain for master in masters for name, plain in state_scalars(master).items()}


def load(master: MasterWeights, state: dict[tuple[str, str], Tensor], scalars: Scalars, **given: Any) -> None:
    def keys(name: str) -> list[str]:
        return [key for owner, key in state if owner == name]

    load_state(
        master,
        keys=keys,
        dtype=lambda name, key: state[name, key].dtype,
        read=lambda name, key, start, out: out.copy_(state[name, key].reshape(-1)[start : start + out.numel()]),
        agreed=agree_on_scalars(master, keys, scalars),
        **given,
    )


def plain(steps: int) -> dict[tuple[str, str], Tensor]:
    """The state of plain torch."""
    named = dict(module().named_parameters())
    optimizer = adam(list(named.values()))
    for number in range(steps):
        for name, param in named.items():
            param.grad = gradient_of(name, number)
        optimizer.step()
    return {(n, k): optimizer.state[p][k] for n, p in named.items() if p.numel() for k in ("exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("is_elementwise", [True, False])
def test_ranks_together_hold_the_state_of_plain_torch(world_size: int, parts: int, is_elementwise: bool) -> None:
    masters = ranks(world_size, is_elementwise=is_elementwise)
    for number in range(2):
        for master in masters:
            step(master, number)
    wanted, got = plain(2), whole(masters, parts)
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(got[key], value)
    assert scalars_of(masters) == {name: {"step": 2.0} for name, shape in SHAPES.items() if 0 not in shape}


@pytest.mark.parametrize("written_by", [1, 2, 3])
@pytest.mark.parametrize("read_by", [1, 2, 3])
@pytest.mark.parametrize("is_elementwise", [True, False])
def test_state_loads_into_any_number_of_ranks_and_trains_on_alike(
    written_by: int, read_by: int, is_elementwise: bool
) -> None:
    masters = ranks(written_by)
    for master in masters:
        step(master, 0)
    loaded = ranks(read_by, is_elementwise=is_elementwise, sub_group=48)
    for master in loaded:
        load(master, whole(masters), scalars_of(masters))
        step(master, 1)
    for key, value in plain(2).items():
        torch.testing.assert_close(whole(loaded)[key], value)


@pytest.mark.parametrize("world_size", [1, 3])
def test_state_of_one_parameter_is_found_in_all_its_slices(world_size: int) -> None:
    masters = ranks(world_size)
    for master in masters:
        step(master, 0)
    wanted = plain(1)
    for position, slot in enumerate(masters[0].flats[0].layout.slots):
        name = masters[0].flats[0].members[slot.index].name
        found = [part for m in masters for part in state_of(m, m.flats[0], position, "exp_avg")]
        joined = torch.cat([torch.zeros(0), *[values for _, values in sorted(found, key=lambda part: part[0].param_start)]])
        assert torch.equal(joined.view(SHAPES[name]), wanted.get((name, "exp_avg"), torch.zeros(SHAPES[name])))
        assert not any(state_of(m, m.flats[0], position, "no such key") for m in masters)


def test_before_the_first_step_there_is_nothing() -> None:
    masters = ranks(2)
    assert whole(masters) == {}
    assert not any(scalars_of(masters).values())
    for master in masters:
        load(master, {}, {})
        assert not master.optimizer.state


def test_hyperparameters_come_back_or_stay_as_asked() -> None:
    (master,) = ranks(1)
    step(master, 0)
    load(master, whole([master]), scalars_of([master]), groups=[{"lr": 0.5}])
    assert master.optimizer.param_groups[0]["lr"] == 0.5
    load(master, whole([master]), scalars_of([master]))
    assert master.optimizer.param_groups[0]["lr"] == 0.5
    assert [id(p) for p in master.optimizer.param_groups[0]["params"]] == [id(s.param) for s in master.slices]


def test_loading_again_fills_the_same_memory_and_forgets_what_was_there() -> None:
    (master,) = ranks(1, sub_group=1000)  # one slice
    step(master, 0)
    state, scalars = whole([master]), scalars_of([master])
    places = {id(s.param): master.optimizer.state[s.param]["exp_avg"].data_ptr() for s in master.slices}
    step(master, 1)
    left_out = {key: value for key, value in state.items() if key[0] != "a"}
    load(master, left_out, scalars)
    assert places == {id(s.param): master.optimizer.state[s.param]["exp_avg"].data_ptr() for s in master.slices}
    for key, value in whole([master]).items():
        assert torch.equal(value, state[key] if key in left_out else torch.zeros(SHAPES["a"]))


def test_parameters_that_share_a_slice_must_agree_on_their_counters() -> None:
    (master,) = ranks(1)
    step(master, 0)
    scalars = scalars_of([master])
    scalars["b"] = {"step": 7.0}
    before = whole([master])
    with pytest.raises(CheckpointError, match=r"(?s)'b'.*load_optimizer_states=False"):
        load(master, {key: value + 1 for key, value in before.items()}, scalars)
    assert all(torch.equal(value, before[key]) for key, value in whole([master]).items())


def test_a_sharded_optimizer_is_handed_back_without_the_state_it_has_no_whole_of() -> None:
    masters = ranks(2)
    for master in masters:
        step(master, 0)
        hand_back(master)
        assert not master.optimizer.state
        members = {id(member.param) for member in master.flats[0].members}
        assert {id(p) for p in master.optimizer.param_groups[0]["params"]} == members
