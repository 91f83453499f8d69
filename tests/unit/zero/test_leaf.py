from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from torch import nn

from deepspeed.config.zero import LeafModuleConfig
from deepspeed.errors import ArgumentError
from deepspeed.zero.leaf import (
    apply_leaf_config,
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)


class Expert(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert(), Expert()])


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), Experts(), Experts())


@pytest.mark.parametrize("given", [Experts, "Experts", f"{Experts.__module__}.Experts"])
def test_modules_are_marked_by_class_by_name_of_class_and_by_full_name(given: type[nn.Module] | str) -> None:
    model = _model()
    assert set_z3_leaf_modules(model, [given]) == [model[1], model[2]] == get_z3_leaf_modules(model)
    assert z3_leaf_module(model[1])
    assert not z3_leaf_module(model[0])
    assert all(z3_leaf_parameter(p) for p in model[1].parameters())
    assert not z3_leaf_parameter(model[0].weight)
    assert model[1]._z3_leaf  # what clients read
    assert unset_z3_leaf_modules(model, [given]) == [model[1], model[2]]
    assert get_z3_leaf_modules(model) == []
    assert not any(z3_leaf_parameter(p) for p in model.parameters())


def test_subclasses_of_a_class_are_marked_too() -> None:
    model = _model()
    assert len(set_z3_leaf_modules(model, [nn.Linear])) == 5


def test_modules_are_marked_by_their_own_name_and_by_the_end_of_it() -> None:
    model = _model()
    assert set_z3_leaf_modules_by_name(model, ["1", "2.experts.0"]) == [model[1], model[2].experts[0]]
    assert set_z3_leaf_modules_by_name(model, ["1"], flag=False) == [model[1]]
    assert get_z3_leaf_modules(model) == [model[2].experts[0]]
    assert set_z3_leaf_modules_by_suffix(model, ["experts"]) == [model[1].experts, model[2].experts]
    set_z3_leaf_module(model[0], True)
    assert get_z3_leaf_modules(model)[0] is model[0]


@pytest.mark.parametrize(
    "mark", [set_z3_leaf_modules, unset_z3_leaf_modules, set_z3_leaf_modules_by_name, set_z3_leaf_modules_by_suffix]
)
def test_marking_nothing_is_an_error_unless_it_may_be(mark: Callable[..., list[nn.Module]]) -> None:
    with pytest.raises(ValueError, match=r"no module of Sequential fits \['Absent'\]; needed one at least"):
        mark(_model(), ["Absent"])
    assert mark(_model(), ["Absent"], raise_if_not_found=False) == []
    with pytest.raises(ArgumentError, match="needed a list of"):
        mark(_model(), "Absent")
    with pytest.raises(ArgumentError, match="needed a list of"):
        mark(_model(), [3])


def test_the_config_marks_by_class_name_and_suffix_and_warns_of_what_fits_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    model = _model()
    assert apply_leaf_config(model, LeafModuleConfig()) == []
    assert caplog.records == []  # the default names classes of libraries that need not be there
    config = LeafModuleConfig(classes=["Experts"], names=["0", "7"], name_suffixes=["experts.1"])
    assert apply_leaf_config(model, config) == [*model[1:], model[0], model[1].experts[1], model[2].experts[1]]
    assert [record.getMessage() for record in caplog.records] == [
        "zero_optimization.leaf_module.names holds '7', which fits no module of the model: correct it"
    ]
