from __future__ import annotations

import copy
import pickle

import pytest
from torch import nn

from deepspeed.errors import ArgumentError
from deepspeed.zero.external import (
    attach_external_tables,
    external_parameters_of,
    register_external_parameter,
    unregister_external_parameter,
)


def test_a_registered_parameter_is_known_once_until_it_is_unregistered() -> None:
    user, owner = nn.Linear(2, 2), nn.Linear(2, 2)
    assert external_parameters_of(user) == ()
    register_external_parameter(user, owner.weight)
    register_external_parameter(user, owner.bias)
    register_external_parameter(user, owner.weight)
    assert [id(p) for p in external_parameters_of(user)] == [id(owner.weight), id(owner.bias)]
    assert [(name, id(p)) for name, p in user.ds_external_parameters()] == [("0", id(owner.weight)), ("1", id(owner.bias))]
    unregister_external_parameter(user, owner.weight)
    assert [id(p) for p in external_parameters_of(user)] == [id(owner.bias)]
    with pytest.raises(ArgumentError, match="is not registered there"):
        unregister_external_parameter(user, owner.weight)


def test_every_module_has_the_published_method_after_attaching() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    register_external_parameter(model[1], model[0].weight)
    attach_external_tables(model.modules())
    assert [len(list(module.ds_external_parameters())) for module in model.modules()] == [0, 0, 1]
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


def test_a_copy_points_at_the_copied_parameter_and_a_pickle_needs_nothing_of_ours() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    register_external_parameter(model[0], model[1].weight)
    copied = copy.deepcopy(model)
    assert external_parameters_of(copied[0])[0] is copied[1].weight
    pickled = pickle.dumps(model)
    assert b"deepspeed" not in pickled
    assert external_parameters_of(pickle.loads(pickled)[0]) == ()


@pytest.mark.parametrize("function", [register_external_parameter, unregister_external_parameter])
def test_other_arguments_are_refused(function: object) -> None:
    with pytest.raises(RuntimeError, match=r"needed a torch.nn.Module and a torch.nn.Parameter"):
        function(nn.Linear(1, 1).weight, nn.Linear(1, 1))  # type: ignore[operator]
