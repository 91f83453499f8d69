"""What each update of ZenFlow does, as data: no tensors here.

    update      1  2 | 3   4  5   | 6  7  8   | 9   10  ...      full_warm_up_rounds 2, update_interval 3, a choice every 6
                F  F | CI  I  IR  | I  I  IR  | CI  I            R: at once. With overlap_step
                F  F | CI  I  IB  | I  I  IR  | CI  I            B: the update of the rest runs behind the next window

    F  everything is updated, as without ZenFlow
    C  columns are chosen, from this step's gradient
    I  important columns are updated; the gradient of the rest is added up
    B  the rest's update starts behind training; what it gives is merged when the next window ends
    R  the rest is updated at once; one that ran behind is merged before

A window is what lies between two updates of the rest. Columns change hands only between windows and while nothing runs
behind: so a sum of gradients belongs to one choice, and the update before a choice is made at once.

With update_interval "auto" a window ends when the rest has become as important as the important columns are (`is_ripe`),
before a choice that is due, and after `MOST_WINDOW_STEPS` steps.

Source: ZenFlow (arXiv:2505.12242). There the interval is adapted when the CPU's accumulated gradient catches up with the
device's; the bounds of a window, and that choices wait for its end, are ours.

Does not live here: the tensors (`zero.zenflow.weights`, which asks at each update).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

__all__ = ["MOST_WINDOW_STEPS", "Progress", "Rest", "Schedule", "Window", "is_ripe", "letters"]

MOST_WINDOW_STEPS = 32
"""Longest window with update_interval "auto": bounds how stale the rest can be."""


class Rest(Enum):
    """What an update does to the rest."""

    WAITS = ""
    NOW = "R"
    BEHIND = "B"


@dataclass(frozen=True)
class Window:
    """The rhythm: every field in updates of the engine.

    Args:
        warm_up: first updates that are full.
        length: of a window; None: it ends when the rest is ripe.
        choice_every: updates between two choices, rounded up to whole windows.
        is_behind: the rest's update may run behind training.
    """

    warm_up: int
    length: int | None
    choice_every: int
    is_behind: bool


@dataclass(frozen=True)
class Progress:
    """Where a schedule stands: what a checkpoint keeps of it."""

    updates: int = 0
    """Made so far, those of the warm-up included."""

    in_window: int = 0
    """Updates whose gradients wait in the sum."""

    since_choice: int = -1
    """Updates with the present choice; -1 before the first."""


class Schedule:
    """Says at each update what it does. All ranks hold the same one."""

    def __init__(self, window: Window, progress: Progress | None = None) -> None:
        self._window = window
        self.progress = progress or Progress()

    @property
    def is_full(self) -> bool:
        """Whether the coming update is one of the warm-up."""
        return self.progress.updates < self._window.warm_up

    @property
    def chooses(self) -> bool:
        """Whether the coming update begins with a choice."""
        return not self.is_full and self.progress.in_window == 0 and self._is_choice_due(self.progress.since_choice)

    @property
    def asks_for_ripeness(self) -> bool:
        """Whether `finish` looks at `ripe`."""
        return self._window.length is None

    def _is_choice_due(self, since_choice: int) -> bool:
        return not 0 <= since_choice < self._window.choice_every

    def full(self) -> None:
        """A full update was made."""
        assert self.is_full  # the caller has asked
        p = self.progress
        self.progress = Progress(p.updates + 1, p.in_window, p.since_choice)

    def finish(self, *, ripe: bool = False) -> Rest:
        """The important columns were updated: what becomes of the rest now.

        Args:
            ripe: the answer of `is_ripe`; only where `asks_for_ripeness`.
        """
        assert not self.is_full  # the caller has asked
        p = self.progress
        since_choice = 1 if self.chooses else p.since_choice + 1
        in_window = p.in_window + 1
        is_due = self._is_choice_due(since_choice)
        length = self._window.length
        is_over = in_window >= length if length is not None else ripe or is_due or in_window >= MOST_WINDOW_STEPS
        self.progress = Progress(p.updates + 1, 0 if is_over else in_window, since_choice)
        if not is_over:
            return Rest.WAITS
        return Rest.BEHIND if self._window.is_behind and not is_due else Rest.NOW


def is_ripe(rest_squares: float, rest_numel: int, important_squares: float, important_numel: int, auto_ratio: float) -> bool:
    """Whether an element of the rest has, in the window so far, as much to say as an important one in this step.

    Compares root mean squares: of the rest's summed gradient, and of this step's gradient in the important columns.

    Args:
        rest_squares: sum of squares of the rest's gradient, summed over the steps of the window.
        rest_numel: elements of the rest.
        important_squares: sum of squares of this step's gradient in the chosen columns.
        important_numel: elements of those.
        auto_ratio: of the two at which the rest is ripe.
    """
    if not rest_numel or not important_numel:
        return True
    rest, important = rest_squares / rest_numel, important_squares / important_numel
    return rest >= auto_ratio * auto_ratio * important  # not for NaN: the window's longest length ends it


def letters(window: Window, updates: int, ripe: Callable[[int], bool] = lambda _: False) -> Iterator[str]:
    """The schedule as text: what updates 1, 2, ... do, in the letters of the module's picture.

    Args:
        window: the rhythm.
        updates: how many.
        ripe: update number -> whether the rest is ripe then.
    """
    schedule = Schedule(window)
    for number in range(1, updates + 1):
        if schedule.is_full:
            schedule.full()
            yield "F"
        else:
            chooses = schedule.chooses
            yield f"{'C' if chooses else ''}I{schedule.finish(ripe=ripe(number)).value}"
