"""Entries without names get them where only one naming is possible, or where the caller knows the names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.checkpoint.original.engine_state import loss_scaler_of
from deepspeed.checkpoint.original.reading.unsharded import entries_of, name_entries, unsharded_scaler
from deepspeed.errors import CheckpointError

Shapes = list[tuple[int, ...]]


def optimizer_of(*groups: Shapes) -> dict[str, Any]:
    """A torch optimizer's state dict; entry n has moments full of n."""
    state, param_groups, number = {}, [], 0
    for shapes in groups:
        indices = list(range(number, number + len(shapes)))
        for index, shape in zip(indices, shapes, strict=True):
            state[index] = {"step": torch.tensor(3.0), "exp_avg": torch.full(shape, float(index))}
        param_groups.append({"lr": 0.1, "params": indices})
        number += len(shapes)
    return {"state": state, "param_groups": param_groups}


def weights_of(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def numbers(optimizer: dict[str, Any], weights: dict[str, Tensor], members: Any = None) -> dict[str, int]:
    """Name -> number of the entry that it got."""
    named = name_entries(entries_of(optimizer), members, weights)
    found = {}
    for name, states in named.optimizer.items():
        out = torch.empty(states["exp_avg"].numel)
        states["exp_avg"].values.read(0, out)
        found[name] = int(out[0])
        assert named.scalars[name] == {"step": 3.0}
    return found


def test_one_group_of_all_parameters_is_in_the_model_s_order() -> None:
    weights = weights_of(a=(2,), b=(2,), c=(3,))
    assert numbers(optimizer_of([(2,), (2,), (3,)]), weights) == {"a": 0, "b": 1, "c": 2}


def test_groups_that_differ_in_shapes_can_be_told_apart() -> None:
    weights = weights_of(a=(2, 2), x=(2,), b=(2, 2), y=(2,))
    assert numbers(optimizer_of([(2, 2), (2, 2)], [(2,), (2,)]), weights) == {"a": 0, "b": 1, "x": 2, "y": 3}


def test_frozen_parameters_of_other_shapes_do_not_confuse() -> None:
    weights = weights_of(a=(2,), frozen=(5,), b=(3,))
    named = name_entries(entries_of(optimizer_of([(2,), (3,)])), None, weights)
    assert list(named.scalars) == ["a", "b"]
    assert named.members == [["a", "b"]]


@pytest.mark.parametrize(
    ("groups", "weights"),
    [
        ([[(2,)]], weights_of(a=(2,), frozen=(2,))),
        ([[(2,)], [(2,)]], weights_of(a=(2,), b=(2,))),
        ([[(7,)]], weights_of(a=(2,))),
    ],
)
def test_what_could_be_named_in_two_ways_or_none_is_refused(groups: list[Shapes], weights: dict[str, Tensor]) -> None:
    with pytest.raises(CheckpointError, match=r"numbers instead of names|do not fit"):
        name_entries(entries_of(optimizer_of(*groups)), None, weights)


def test_names_that_the_caller_knows_are_taken() -> None:
    weights = weights_of(a=(2,), frozen=(2,), b=(2,))
    assert numbers(optimizer_of([(2,)], [(2,)]), weights, [["b"], ["a"]]) == {"b": 0, "a": 1}
    with pytest.raises(CheckpointError, match="do not fit"):
        numbers(optimizer_of([(2,)], [(3,)]), weights, [["b"], ["a"]])
    with pytest.raises(CheckpointError, match="do not fit"):
        numbers(optimizer_of([(2,)]), weights, [["b", "a"]])


def test_fp32_copies_tell_the_names_by_their_rounded_values() -> None:
    masters = [torch.randn(2), torch.randn(2)]
    weights = {"frozen": torch.randn(2).bfloat16(), "b": masters[1].bfloat16(), "a": masters[0].bfloat16()}
    wrapped = {"optimizer_state_dict": optimizer_of([(2,), (2,)]), "fp32_groups": [masters], "cur_scale": 1.0}
    assert numbers(wrapped, weights) == {"a": 0, "b": 1}
    assert list(name_entries(entries_of(wrapped), None, weights).masters) == ["a", "b"]


def test_an_optimizer_before_its_first_step_has_no_state() -> None:
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    named = name_entries(entries_of(optimizer), None, weights_of(a=(2,), b=(3,)))
    assert (named.members, named.optimizer) == ([["a", "b"]], {})


@pytest.mark.parametrize("optimizer", [{"unknown": 1}, {"optimizer_state_dict": {"state": {}}}])
def test_state_of_no_torch_optimizer_is_refused(optimizer: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="not those of a torch optimizer"):
        entries_of(optimizer)


def test_a_fused_wrapper_s_flat_copy_is_refused() -> None:
    with pytest.raises(CheckpointError, match="fused fp16"):
        entries_of({"optimizer_state_dict": optimizer_of([(2,)]), "fp32_groups_flat": [torch.ones(2)]})


def test_a_wrapper_s_loss_scale_is_found() -> None:
    assert loss_scaler_of(unsharded_scaler({"cur_scale": 8.0, "dynamic_loss_scale": False}))["scale"] == 8.0
    assert loss_scaler_of(unsharded_scaler(optimizer_of([(2,)]))) == {}
