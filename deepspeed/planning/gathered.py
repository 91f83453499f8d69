"""How much of a sharded model is whole at once at ZeRO stage 3: one training pass over the units, by `zero.prefetch` itself.

    uses     u0 u1 ... un | un ... u1 u0        forward, then backward; after the update nothing is whole
    at each  room is made, the unit joins, and what `Lookahead` chooses; then the unit stays or goes (`should_keep`)

Called by `states`.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed.zero.prefetch import GatherSettings, Idle, Lookahead, choose_victims, should_keep
from deepspeed.zero.trace import Trace

__all__ = ["most_gathered_numel"]


def most_gathered_numel(numels: Sequence[int], settings: GatherSettings) -> tuple[int, bool]:
    """The most elements that are whole at once, and whether all units stay from forward to backward.

    Args:
        numels: elements of each unit, in order of use.
        settings: the budgets.
    """
    uses = [*range(len(numels)), *reversed(range(len(numels)))]
    run = _Run(numels, uses, settings)
    most, gathers = 0, 0
    for unit in uses:
        gathers += run.use(unit)
        most = max(most, run.live_numel)
        run.leave(unit)
    return most, gathers == len(numels)


class _Run:
    """`zero.pool.UnitPool` over numbers: a second pass, whose order is known from the first."""

    def __init__(self, numels: Sequence[int], uses: Sequence[int], settings: GatherSettings) -> None:
        self._numels = numels
        self._settings = settings
        self._trace = Trace(list(numels))
        for unit in uses:
            self._trace.use(unit)
        self._trace.close()
        self._lookahead = Lookahead(self._trace, numels, settings)
        self._live: dict[int, None] = {}
        self._ahead: set[int] = set()
        self._used = -1
        self.live_numel = 0

    def use(self, unit: int) -> int:
        """Make `unit` whole, then gather ahead; how many units were gathered."""
        self._used = unit
        self._trace.use(unit)
        self._ahead.discard(unit)
        missing = unit not in self._live
        if missing:
            self._make_room(self._numels[unit], -1)
            self._add(unit)
        ahead_numel = sum(self._numels[each] for each in self._ahead)
        chosen = self._lookahead.choose(ahead_numel, self._live.__contains__, self._make_room)
        for each in chosen:
            self._add(each)
        self._ahead.update(chosen)
        return missing + len(chosen)

    def leave(self, unit: int) -> None:
        """`unit` stays or goes."""
        if not should_keep(self._trace.distance(unit), self.live_numel, self._settings):
            self._release(unit)

    def _add(self, unit: int) -> None:
        self._live[unit] = None
        self.live_numel += self._numels[unit]

    def _release(self, unit: int) -> None:
        del self._live[unit]
        self.live_numel -= self._numels[unit]
        self._lookahead.released(unit)

    def _make_room(self, numel: int, beyond: int) -> bool:
        excess = self.live_numel + numel - self._settings.max_live_numel
        if excess > 0:
            others = [unit for unit in self._live if unit not in self._ahead and unit != self._used]
            idle = [Idle(unit, self._numels[unit], self._trace.distance(unit)) for unit in others]
            for unit in choose_victims(idle, excess, beyond):
                self._release(unit)
        return self.live_numel + numel <= self._settings.max_live_numel
