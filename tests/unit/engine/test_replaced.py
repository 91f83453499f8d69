"""Methods of one object that are replaced for a while, by several watchers at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepspeed.engine.replaced import ReplacedMethods


class Thing:
    def name(self, text: str) -> str:
        return f"thing {text}"


def _saying(word: str) -> Callable[..., Any]:
    return lambda method, *args: f"{word} {method(*args)}"


def test_a_replaced_method_is_called_through_and_comes_back() -> None:
    thing, other, methods = Thing(), Thing(), ReplacedMethods()
    methods.replace(thing, "name", _saying("watched"))
    assert (thing.name("a"), other.name("a")) == ("watched thing a", "thing a")
    methods.restore()
    methods.restore()
    assert thing.name("a") == "thing a"
    assert vars(thing) == {}


@pytest.mark.parametrize("first_off", ["inner", "outer"])
def test_watchers_may_leave_in_any_order(first_off: str) -> None:
    thing, inner, outer = Thing(), ReplacedMethods(), ReplacedMethods()
    inner.replace(thing, "name", _saying("inner"))
    outer.replace(thing, "name", _saying("outer"))
    assert thing.name("a") == "outer inner thing a"
    (inner if first_off == "inner" else outer).restore()
    assert thing.name("a") == ("outer thing a" if first_off == "inner" else "inner thing a")
    (outer if first_off == "inner" else inner).restore()
    assert thing.name("a") == "thing a"


def test_a_watcher_may_leave_while_its_method_runs() -> None:
    thing, methods = Thing(), ReplacedMethods()

    def once(method: Callable[..., Any], *args: Any) -> Any:
        methods.restore()
        return method(*args)

    methods.replace(thing, "name", once)
    assert thing.name("a") == thing.name("a") == "thing a"
