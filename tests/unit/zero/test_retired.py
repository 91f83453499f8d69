"""Parameters that become whole at their first use, whatever it is, and at no other time."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.zero.retired import retire


class Own(nn.Parameter):
    """A class of the user's."""


def _retired(count: int = 2, cls: type[nn.Parameter] = nn.Parameter) -> tuple[list[nn.Parameter], list[str]]:
    """Empty parameters that are to become rows of ones, and what has been done."""
    params, done = [cls(torch.empty(0)) for _ in range(count)], []

    def make_whole() -> None:
        done.append("whole")
        for param in params:
            param.data = torch.ones(3)

    retire(params, make_whole)
    return params, done


USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "an operation": lambda param: param + 1,
    "the second operand": lambda param: torch.ones(3) * param,
    "in a list": lambda param: torch.stack([param, torch.ones(3)]),
    "by keyword": lambda param: torch.sum(input=param),
    "data": lambda param: param.data,
    "shape": lambda param: param.shape,
    "numel": lambda param: param.numel(),
    "its place in memory": lambda param: param.data_ptr(),
    "detach": lambda param: param.detach(),
    "a copy": copy.deepcopy,
    "a pickle": pickle.dumps,
    "its text": repr,
    "NumPy": lambda param: param.detach().numpy(),
    "the layer": lambda param: nn.functional.linear(torch.ones(3), param),
    "in place": nn.init.zeros_,
}


@pytest.mark.parametrize("use", USES)
def test_the_first_use_makes_all_whole_once(use: str) -> None:
    params, done = _retired()
    USES[use](params[1])
    USES[use](params[0])
    assert done == ["whole"]
    assert [type(param) for param in params] == [nn.Parameter] * 2
    assert [param.numel() for param in params] == [3, 3]
    assert not any(vars(param) for param in params)


def test_a_module_of_them_is_used_as_ever() -> None:
    layer = nn.Linear(2, 2)
    wanted = {name: value.clone() for name, value in layer.state_dict().items()}
    params = list(layer.parameters())
    kept = [param.data for param in params]
    for param in params:
        param.data = torch.empty(0)

    def make_whole() -> None:
        for param, value in zip(params, kept, strict=True):
            param.data = value

    for use in (layer.state_dict, lambda: layer(torch.ones(1, 2)).sum().backward(), layer.double):
        retire(params, make_whole)
        use()
        assert [type(param) for param in layer.parameters()] == [nn.Parameter] * 2
    assert all(torch.equal(value.float(), wanted[name]) for name, value in layer.state_dict().items())


def test_what_needs_no_values_leaves_them_away() -> None:
    params, done = _retired()
    assert params[0] in set(params)
    assert {params[0]: 1}[params[0]] == 1
    assert params[0].requires_grad
    params[0].requires_grad = False
    params[0].requires_grad_(True)
    params[0].grad = None
    assert params[0].grad is None
    assert (params[0].dtype, params[0].device) == (torch.float32, torch.device("cpu"))
    assert params[0].is_floating_point()
    assert isinstance(params[0], nn.Parameter)
    assert nn.ParameterList(params)[0] is params[0]
    assert not hasattr(params[0], "ds_id")
    assert done == []


@pytest.mark.parametrize("cls", [nn.Parameter, Own])
@pytest.mark.parametrize(
    "made", [copy.deepcopy, lambda param: type(param)(param.data), lambda param: pickle.loads(pickle.dumps(param))]
)
def test_what_is_made_from_one_is_an_ordinary_parameter(made: Callable[..., Any], cls: type[nn.Parameter]) -> None:
    params, done = _retired(1, cls)
    copied = made(params[0])
    assert type(copied) in (nn.Parameter, cls)  # torch's own pickles of parameters forget the class
    assert not vars(copied)
    assert done == ["whole"]
    assert torch.equal(copied + 1, torch.full((3,), 2.0))


def test_a_class_of_the_users_comes_back() -> None:
    params, _ = _retired(1, Own)
    assert isinstance(params[0], Own)
    params[0].sum()
    assert type(params[0]) is Own


def test_others_stay_as_they_are() -> None:
    (first, *_), _ = _retired()
    (second, *_), done = _retired()
    first.sum()
    assert done == []
    (first + second).sum()
    assert done == ["whole"]


def test_an_error_while_they_become_whole_reaches_who_uses_one() -> None:
    def fail() -> None:
        raise RuntimeError("a peer left")

    param = nn.Parameter(torch.empty(0))
    retire([param], fail)
    with pytest.raises(RuntimeError, match="a peer left"):
        param.sum()


def test_they_go_when_nobody_has_them() -> None:
    params, _ = _retired()
    references = [weakref.ref(param) for param in params]
    del params, _
    gc.collect()
    assert [reference() for reference in references] == [None, None]
