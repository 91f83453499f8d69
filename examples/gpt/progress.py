"""What a run shows while it trains: a bar on a terminal, a line now and then elsewhere, nothing on ranks above 0."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


class Display(Protocol):
    """Shows the progress of one launch; used as a context manager."""

    def __enter__(self) -> Display:
        """Begin."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End."""

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show one optimizer step; `loss` is in nats per token."""

    def say(self, text: str) -> None:
        """Show a line that stays."""


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show nothing."""

    def say(self, text: str) -> None:
        """Show nothing."""


class Lines:
    """A line every `SECONDS_BETWEEN_LINES`, for logs."""

    def __init__(self, first: int, last: int) -> None:
        self._last = last
        self._first = first
        self._started = self._spoke = time.monotonic()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Print when it is time again, and at the end."""
        now = time.monotonic()
        if now - self._spoke < SECONDS_BETWEEN_LINES and step < self._last:
            return
        self._spoke = now
        eta_seconds = (now - self._started) / (step - self._first) * (self._last - step)
        self.say(f"step {step}/{self._last}  loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  {eta_seconds:.0f} s to go")

    def say(self, text: str) -> None:
        """Print."""
        print(text, flush=True)


class Bar:
    """A progress bar with loss, tokens per second and time to go."""

    def __init__(self, first: int, last: int) -> None:
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(highlight=False))
        self._task = self._progress.add_task("train", total=last, completed=first, loss=float("nan"), speed=0.0)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step, loss=loss, speed=tokens_per_second)

    def say(self, text: str) -> None:
        """Print above the bar."""
        self._progress.console.print(text, markup=False)


def make_display(is_first_rank: bool, first: int, last: int) -> Display:
    """The display for this rank, of the optimizer steps after `first` up to `last`."""
    if not is_first_rank:
        return Silent()
    return Bar(first, last) if sys.stdout.isatty() else Lines(first, last)
