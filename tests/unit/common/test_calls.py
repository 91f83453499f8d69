from __future__ import annotations

import pytest

from deepspeed.common.calls import Calls


def test_calls_run_in_the_order_in_which_they_were_added() -> None:
    calls, made = Calls(), list[str]()
    calls()
    calls.add(lambda: made.append("a"))
    calls.add(lambda: made.append("b"))
    calls()
    assert made == ["a", "b"]


def test_the_first_error_ends_it() -> None:
    calls, made = Calls(), list[str]()
    calls.add(lambda: 1 / 0)
    calls.add(lambda: made.append("later"))
    with pytest.raises(ZeroDivisionError):
        calls()
    assert made == []
