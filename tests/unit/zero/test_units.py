"""`deepspeed.zero.units`: the module tree cut into units."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deepspeed.zero.units import UnitPlan, is_leaf, plan_units


def _plan(root: nn.Module, *, limit_numel: int = 10**9, threshold: int = 0, least: int = 0) -> list[UnitPlan]:
    sharded = {p: p.numel() for p in root.parameters() if p.numel() >= least}
    return plan_units(root, sharded, limit_numel=limit_numel, granularity_threshold=threshold)


def _text(root: nn.Module, plans: list[UnitPlan]) -> dict[str, list[str]]:
    """Unit name -> names of its parameters, borrowed ones in brackets."""
    names = {p: name for name, p in root.named_parameters()}
    return {plan.name: [names[p] for p in plan.params] + [f"[{names[p]}]" for p in plan.borrowed] for plan in plans}


class _Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))


class _Gpt(nn.Module):
    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.pos = nn.Parameter(nn.init.zeros_(nn.Linear(3, 4).weight.detach()))
        self.wte = nn.Embedding(7, 4)
        self.h = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(4, 7, bias=False)
        if is_tied:
            self.head.weight = self.wte.weight


def test_blocks_of_a_list_are_units_and_the_rest_is_cut_by_module() -> None:
    model = _Gpt()
    plans = _plan(model, limit_numel=84)
    assert [(plan.number, plan.name, plan.is_whole) for plan in plans] == [
        (0, "", False),
        (1, "wte", True),
        (2, "h.0", True),
        (3, "h.1", True),
        (4, "head", True),
    ]
    block = [f"h.0.{name}" for name, _ in model.h[0].named_parameters()]
    assert _text(model, plans)["h.0"] == block
    assert _text(model, plans)[""] == ["pos"]
    assert plans[2].modules == (model.h[0],)
    assert [plan.name for plan in _plan(model, limit_numel=83)][2:4] == ["h.0.norm", "h.0.mlp.0 to h.0.mlp.2"]


def test_tiny_neighbours_in_a_list_are_one_unit() -> None:
    layers = nn.Sequential(*(nn.Linear(256, 255) if n == 3 else nn.Sequential(nn.Linear(2, 2)) for n in range(6)))
    plans = _plan(layers)
    assert [plan.name for plan in plans] == ["0 to 5"]
    assert plans[0].modules == tuple(layers)
    assert [plan.name for plan in _plan(layers, limit_numel=12)] == ["0 to 1", "2", "3", "4 to 5"]
    layers[1]._z3_leaf = True
    layers[4][0].weight = layers[0][0].weight
    assert [plan.name for plan in _plan(layers)] == ["0", "1", "2 to 3", "4", "5"]
    wide = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(5))  # 2**16 elements each
    assert [plan.name for plan in _plan(wide)] == ["0 to 1", "2 to 3", "4"]


def test_a_tied_parameter_belongs_to_its_first_module_and_is_borrowed_by_the_other() -> None:
    assert _text(model := _Gpt(), _plan(model))["head"] == ["[wte.weight]"]
    assert _text(model := _Gpt(is_tied=False), _plan(model))["head"] == ["head.weight"]


def test_a_block_above_the_limit_is_cut_further() -> None:
    names = [plan.name for plan in _plan(_Gpt(), limit_numel=75)]
    assert names == ["", "wte", "h.0.norm", "h.0.mlp.0", "h.0.mlp.2", "h.1.norm", "h.1.mlp.0", "h.1.mlp.2", "head"]
    assert [plan.name for plan in _plan(_Gpt(), limit_numel=84)] == ["", "wte", "h.0", "h.1", "head"]


def test_parameters_that_are_not_sharded_are_in_no_unit_and_count_for_no_limit() -> None:
    model = _Gpt()
    plans = _plan(model, least=20, limit_numel=64)  # of a block's 84 elements
    assert _text(model, plans) == {
        "wte": ["wte.weight"],
        "h.0": ["h.0.mlp.0.weight", "h.0.mlp.2.weight"],
        "h.1": ["h.1.mlp.0.weight", "h.1.mlp.2.weight"],
        "head": ["[wte.weight]"],
    }


def test_a_leaf_module_is_one_unit_however_large() -> None:
    model = _Gpt()
    model.h._z3_leaf = True
    assert is_leaf(model.h)
    assert not is_leaf(model)
    assert [plan.name for plan in _plan(model, limit_numel=1)] == ["", "wte", "h", "head"]


def test_modules_of_few_elements_per_module_are_one_unit() -> None:
    model = nn.Sequential(nn.Linear(50, 50), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    small = 12 // 3  # two layers of 6 elements, and the module around them
    assert [plan.name for plan in _plan(model, limit_numel=1, threshold=small)] == ["0", "1.0", "1.1"]
    assert [plan.name for plan in _plan(model, limit_numel=1, threshold=small + 1)] == ["0", "1"]
    assert [plan.name for plan in _plan(model, limit_numel=1, threshold=10**6)] == [""]


def test_what_a_list_of_parameters_holds_is_used_by_the_module_around_it() -> None:
    model = nn.Module()
    model.scales = nn.ParameterList([nn.Parameter(nn.Linear(2, 2).weight.detach()) for _ in range(2)])
    model.other = nn.Linear(2, 2)
    assert _text(model, _plan(model)) == {"": ["scales.0", "scales.1"], "other": ["other.weight", "other.bias"]}


def test_a_module_that_occurs_twice_is_one_unit_and_a_block_around_it_borrows() -> None:
    shared = nn.Linear(3, 3)
    model = nn.ModuleList([nn.Sequential(shared, nn.Linear(3, 3)), shared, nn.Sequential(nn.ReLU(), shared)])
    assert _text(model, _plan(model)) == {
        "0": ["0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias"],
        "2": ["[0.0.weight]", "[0.0.bias]"],
    }


@pytest.mark.parametrize("limit_numel", [1, 75, 10**9])
@pytest.mark.parametrize("build", [_Gpt, lambda: nn.MultiheadAttention(4, 2), lambda: nn.Linear(2, 2), nn.ReLU])
def test_every_sharded_parameter_is_in_exactly_one_unit(build: Callable[[], nn.Module], limit_numel: int) -> None:
    model = build()
    plans = _plan(model, limit_numel=limit_numel)
    owned = [p for plan in plans for p in plan.params]
    assert sorted(map(id, owned)) == sorted(map(id, model.parameters()))
    assert [plan.number for plan in plans] == list(range(len(plans)))


@given(widths=st.lists(st.integers(1, 6), max_size=6), limit_numel=st.integers(0, 60), threshold=st.integers(0, 40))
def test_units_follow_the_order_of_registration(widths: list[int], limit_numel: int, threshold: int) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, width), nn.Linear(width, 2)) for width in widths))
    order = {p: position for position, p in enumerate(model.parameters())}
    plans = _plan(model, limit_numel=limit_numel, threshold=threshold)
    assert [order[p] for plan in plans for p in plan.params] == list(range(len(order)))
