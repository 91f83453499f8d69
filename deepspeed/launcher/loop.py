"""One thread that waits for many things: what the kernel can wait for, and a time.

[Note: stopped meanwhile] A process that was stopped (Ctrl-Z) and goes on after the time of its wait finds that wait over,
though much may have come. Who judges silence must hear that first, so it is asked for once more.

Does not live here: what is waited for, and what then happens (`launch`, `link`).
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

__all__ = ["Loop", "Watched"]

_LONGEST_SECONDS = 3600.0


class Watched(Protocol):
    """A file, a socket, or what else has a descriptor."""

    def fileno(self) -> int:
        """The descriptor."""


class Loop:
    """Callbacks by descriptor."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Loop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._selector.close()

    def watch(self, source: Watched | int, callback: Callable[[], None], *, writes: bool = False) -> None:
        """Call `callback` when `source` can be read, or has ended; with `writes` also when it can be written to."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
        if source in self._selector.get_map():
            self._selector.modify(source, events, callback)
        else:
            self._selector.register(source, events, callback)

    def forget(self, source: Watched | int) -> None:
        """Watch it no longer; call this before it is closed."""
        if source in self._selector.get_map():
            self._selector.unregister(source)

    def wait(self, until: float) -> None:
        """Wait until something has happened, and call its callbacks; at most until `until` (of `time.monotonic`)."""
        seconds = min(max(0.0, until - time.monotonic()), _LONGEST_SECONDS)
        ready = self._selector.select(seconds) or self._selector.select(0)  # [Note: stopped meanwhile]
        for key, _ in ready:
            if key.fileobj in self._selector.get_map():  # a callback before this one may have closed it
                key.data()
