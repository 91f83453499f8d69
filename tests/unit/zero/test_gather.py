from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from deepspeed.zero.gather import GatheredParameters, is_one_rank_editing
from deepspeed.zero.holder import set_holder
from deepspeed.zero.published import publish


class FakeHolder:
    """Writes down what it is asked, and fails when it is told to."""

    def __init__(self, name: str, log: list[str], fails: str = "") -> None:
        self._name = name
        self._log = log
        self._fails = fails

    def _note(self, call: str, params: Sequence[nn.Parameter], more: str = "") -> None:
        self._log.append(f"{self._name} {call} {len(params)}{more}")
        if call == self._fails:
            raise RuntimeError(f"{call} fails")

    def fetch(self, params: Sequence[nn.Parameter]) -> None:
        self._note("fetch", params)

    def drop(self, params: Sequence[nn.Parameter]) -> None:
        self._note("drop", params)

    def store(self, params: Sequence[nn.Parameter], source_rank: int) -> None:
        self._note("store", params, f" from {source_rank}")


def _held(holder: FakeHolder) -> nn.Parameter:
    param = nn.Parameter(torch.empty(0))
    set_holder(param, holder)
    publish(param, torch.Size([2]), torch.zeros(2))
    return param


def test_each_holder_is_asked_once_and_in_the_order_in_which_parameters_were_sharded() -> None:
    log: list[str] = []
    a, b = FakeHolder("a", log), FakeHolder("b", log)
    params = [_held(a), _held(b), _held(a)]
    with GatheredParameters(reversed([*params, *params]), modifier_rank=3):
        assert log == ["a fetch 2", "b fetch 1"]
    assert log[2:] == ["b store 1 from 3", "b drop 1", "a store 2 from 3", "a drop 2"]


def test_without_a_modifier_rank_and_after_an_exception_nothing_is_stored() -> None:
    log: list[str] = []
    param = _held(FakeHolder("a", log))
    with GatheredParameters(param):
        pass
    with pytest.raises(ValueError, match="inside"), GatheredParameters(param, modifier_rank=0):
        raise ValueError("inside")
    assert log == ["a fetch 1", "a drop 1"] * 2


def test_a_fetch_that_fails_drops_what_was_fetched_before_it() -> None:
    log: list[str] = []
    params = [_held(FakeHolder("a", log)), _held(FakeHolder("b", log, fails="fetch"))]
    with pytest.raises(RuntimeError, match="fetch fails"), GatheredParameters(params, modifier_rank=0):
        raise AssertionError("the block is not entered")
    assert log == ["a fetch 1", "b fetch 1", "a drop 1"]
    assert not is_one_rank_editing()


def test_a_store_that_fails_still_drops() -> None:
    log: list[str] = []
    block = GatheredParameters(_held(FakeHolder("a", log, fails="store")), modifier_rank=0)
    with pytest.raises(RuntimeError, match="store fails"), block:
        pass
    assert log == ["a fetch 1", "a store 1 from 0", "a drop 1"]


def test_one_rank_may_be_editing_only_inside_a_block_with_a_modifier_rank() -> None:
    with GatheredParameters([]):
        assert not is_one_rank_editing()
        with GatheredParameters([], modifier_rank=0), GatheredParameters([]):
            assert is_one_rank_editing()
    assert not is_one_rank_editing()
