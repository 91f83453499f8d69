"""Several functions called as one."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Calls"]


class Calls:
    """Calls what was added, in that order; nothing at first."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []

    def add(self, call: Callable[[], object]) -> None:
        """Call it too, after those that were added before."""
        self._calls.append(call)

    def __call__(self) -> None:
        """Call them all. The first error ends it."""
        for call in self._calls:
            call()
