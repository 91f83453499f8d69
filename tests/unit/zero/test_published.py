from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.zero.holder import set_holder
from deepspeed.zero.published import ZeroParamStatus, in_rank_order, publish, set_status, withdraw


class NullHolder:
    """An engine's holder, as far as these tests go: it cannot copy."""

    def fetch(self, params: Sequence[nn.Parameter]) -> None:
        for param in params:
            param.data = torch.ones(param.ds_shape)  # type: ignore[attr-defined]

    def drop(self, params: Sequence[nn.Parameter]) -> None:
        for param in params:
            param.data = torch.empty(0)

    def store(self, params: Sequence[nn.Parameter], source_rank: int) -> None:
        raise AssertionError("nobody edits here")


def _published() -> Any:
    param = nn.Parameter(torch.empty(0))
    set_holder(param, NullHolder())
    publish(param, torch.Size([2, 3]), torch.zeros(4))
    return param


def test_a_published_parameter_has_every_attribute_that_clients_read() -> None:
    param = _published()
    assert (param.ds_shape, param.ds_numel, param.partition_numel()) == ((2, 3), 6, 4)
    assert param.ds_status is ZeroParamStatus.NOT_AVAILABLE
    assert not param.ds_persist
    assert param.ds_process_group is None
    param.ds_active_sub_modules.clear()
    set_status(param, ZeroParamStatus.AVAILABLE)
    assert param.ds_status is ZeroParamStatus.AVAILABLE


def test_publishing_again_keeps_the_identity_and_withdrawing_leaves_what_the_user_set() -> None:
    param = _published()
    param.tag = "mine"
    identity = param.ds_id
    publish(param, torch.Size([6]), torch.zeros(3))
    assert (param.ds_id, param.ds_shape) == (identity, (6,))
    withdraw(param)
    set_holder(param, None)
    assert vars(param) == {"tag": "mine"}
    withdraw(param)


def test_a_parameter_too_small_to_be_sharded_says_that_it_is_whole_and_pickles_as_an_ordinary_one() -> None:
    param: Any = nn.Parameter(torch.ones(2))
    param.tag = "mine"
    publish(param, param.shape, param.detach(), is_whole=True)
    param.ds_active_sub_modules.clear()
    assert (param.ds_status, param.ds_persist) == (ZeroParamStatus.AVAILABLE, True)
    assert (param.ds_numel, param.partition_numel()) == (2, 2)
    assert vars(pickle.loads(pickle.dumps(param))) == {"tag": "mine"}
    assert copy.deepcopy(param).tolist() == [1.0, 1.0]
    withdraw(param)
    assert vars(param) == {"tag": "mine"}


def test_parameters_are_ordered_by_identity_and_each_comes_once() -> None:
    first, second = _published(), _published()
    assert [id(p) for p in in_rank_order([second, first, second])] == [id(first), id(second)]


def test_a_parameter_that_cannot_be_copied_or_pickled_says_what_to_do() -> None:
    param = _published()
    for act in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match=r"GatheredParameters\(model.parameters\(\)\)"):
            act(param)


def test_a_whole_parameter_is_copied_and_pickled_as_an_ordinary_one() -> None:
    param = _published()
    param.tag = "mine"
    param.all_gather()
    set_status(param, ZeroParamStatus.AVAILABLE)
    pair = copy.deepcopy([param, param])
    assert pair[0] is pair[1]
    loaded = pickle.loads(pickle.dumps(param))
    assert vars(loaded) == {"tag": "mine"}
    for plain in (pair[0], loaded):
        assert not hasattr(plain, "ds_id")
        assert plain.tolist() == [[1.0] * 3] * 2


def test_the_attributes_do_not_keep_a_parameter_alive() -> None:
    param = _published()
    ref = weakref.ref(param)
    gc.disable()
    try:
        del param
        assert ref() is None
    finally:
        gc.enable()
