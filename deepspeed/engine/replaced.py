"""Methods of single objects, replaced for a while: how an engine is watched without asking anything when nobody watches.

    replace(engine, "forward", by)    engine.forward(x) --> by(the method before, x)
    restore()                         all is as it was before; what others put on top meanwhile stays

Lives here: putting on and taking off. Does not live here: what is done instead (`profiled_step`, `named_ranges`,
`measured_schedule`, `traced_steps`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["ReplacedMethods"]


class _Replacement:
    """One method of one object."""

    def __init__(self, owner: Any, name: str, by: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._is_on = True
        method = getattr(owner, name)
        self._before = owner.__dict__.get(name)

        @functools.wraps(method)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return by(method, *args, **kwargs) if self._is_on else method(*args, **kwargs)

        self._replacement = replacement
        owner.__dict__[name] = replacement

    def restore(self) -> None:
        self._is_on = False
        if self._owner.__dict__.get(self._name) is not self._replacement:
            return  # somebody replaced this one: it passes through from now on
        if self._before is None:
            del self._owner.__dict__[self._name]
        else:
            self._owner.__dict__[self._name] = self._before


class ReplacedMethods:
    """What one watcher has replaced."""

    def __init__(self) -> None:
        self._put: list[_Replacement] = []

    def replace(self, owner: Any, name: str, by: Callable[..., Any]) -> None:
        """Let `by(method, *args, **kwargs)` be called for `owner.name(*args, **kwargs)`; `method` is what was there."""
        self._put.append(_Replacement(owner, name, by))

    def restore(self) -> None:
        """Take all off again; a second call does nothing."""
        while self._put:
            self._put.pop().restore()
