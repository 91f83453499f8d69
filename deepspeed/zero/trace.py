"""In which order units are used between two updates, and what therefore comes next.

    step 1   uses    0 1 2 3 3 2 1 0      recorded (forward, then backward)
    step 2   uses    0 1 2 .              as in step 1: position 2, next is 3; unit 1 comes again in (2) 3 3 2
             uses    0 1 3                2 was left out: position moves on to 3
             uses    0 1 7                7 was not expected: position stays, the next use is 2 as before
    close            order was different: what this step did is what the next one is expected to do

A prediction is never needed for right results: a unit that was not foreseen is gathered when it is used.

Lives here: plain numbers. Does not live here: what to gather or release (`zero.prefetch`). Called by `zero.coordinator`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

__all__ = ["Trace"]

_MOST_USES = 1 << 20  # of one step; a caller that never closes must not fill the memory


class Trace:
    """The sequence of units of one kind of pass (training, or evaluation).

    Args:
        numels: elements of each unit, by number.
        wraps: the pass is repeated with the same values (evaluation), so a unit is used again after the end.
    """

    def __init__(self, numels: Sequence[int], *, wraps: bool = False) -> None:
        self._numels = numels
        self._wraps = wraps
        self._expected: list[int] = []
        self._starts: list[int] = [0]
        self._places: dict[int, list[int]] = {}
        self._recorded: list[int] = []
        self._differences = 0
        self.position = -1
        """Index of the latest use in the expected sequence; -1 before the first."""

    @property
    def is_known(self) -> bool:
        """Whether a whole pass was recorded before."""
        return bool(self._expected)

    @property
    def length(self) -> int:
        """Uses in the expected sequence."""
        return len(self._expected)

    @property
    def differences(self) -> int:
        """Uses of this pass that were not the expected ones."""
        return self._differences

    def use(self, unit: int) -> None:
        """Unit `unit` is used now."""
        recorded = self._recorded
        if len(recorded) < _MOST_USES:
            recorded.append(unit)
        following = self.position + 1
        if following < len(self._expected) and self._expected[following] == unit:
            self.position = following
            return
        self._differences += 1
        later = self._next_place(unit)
        if later is not None:
            self.position = later

    def close(self) -> bool:
        """The pass is over.

        Returns:
            Whether its order differed from the one expected (False for the first pass, and for one without uses).
        """
        recorded, was_known = self._recorded, self.is_known
        if not recorded:
            return False
        has_changed = recorded != self._expected
        if has_changed:
            self._expect(recorded)
        self._restart()
        return has_changed and was_known

    def forget(self) -> None:
        """Expect nothing: the next pass is the first."""
        self._expect([])
        self._restart()

    def _restart(self) -> None:
        self._recorded = []
        self._differences = 0
        self.position = -1

    def _expect(self, sequence: list[int]) -> None:
        self._expected = sequence
        self._starts = [0, *accumulate(self._numels[unit] for unit in sequence)]
        self._places = {}
        for place, unit in enumerate(sequence):
            self._places.setdefault(unit, []).append(place)

    # -- what comes next ----------------------------------------------------------------------------------------------

    def unit_at(self, place: int) -> int:
        """The unit of the use at `place` of the expected sequence."""
        return self._expected[place]

    def next_place(self, unit: int) -> int | None:
        """Index of the next expected use of `unit` in this pass; None when there is none or nothing is known."""
        return self._next_place(unit)

    def distance_to(self, place: int) -> int:
        """Elements of the units used after now and before the use at `place`, which is still to come."""
        return self._starts[place] - self._starts[self.position + 1]

    def distance(self, unit: int) -> int | None:
        """Elements used before `unit` is used again; None when that is not foreseen."""
        later = self._next_place(unit)
        if later is not None:
            return self.distance_to(later)
        places = self._places.get(unit)
        if not self._wraps or places is None:
            return None
        return self._starts[-1] - self._starts[self.position + 1] + self._starts[places[0]]

    def was_used(self, unit: int) -> bool:
        """Whether `unit` had an expected use up to now in this pass."""
        places = self._places.get(unit)
        return places is not None and places[0] <= self.position

    def _next_place(self, unit: int) -> int | None:
        places = self._places.get(unit)
        if places is None:
            return None
        if places[-1] <= self.position:
            return None
        return places[bisect_right(places, self.position)]
