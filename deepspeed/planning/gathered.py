"""How much of a sharded model is whole at once at ZeRO stage 3: the engine's pool over numbers, by `zero.prefetch` itself.

    uses     u0 u1 ... un | un ... u1 u0        forward, then backward; after the update nothing is whole
    at each  room is made, the unit joins, and what `Lookahead` chooses; then the unit stays or goes (`should_keep`)

Called by `passes`, which knows when units are used, and by `states` where only their order is known.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from deepspeed.zero.prefetch import GatherSettings, Idle, Lookahead, choose_victims, should_keep
from deepspeed.zero.trace import Trace

__all__ = ["Pool", "most_gathered_numel"]


def most_gathered_numel(numels: Sequence[int], settings: GatherSettings) -> tuple[int, bool]:
    """The most elements that are whole at once, and whether all units stay from forward to backward.

    Args:
        numels: elements of each unit, in order of use.
        settings: the budgets.
    """
    uses = [*range(len(numels)), *reversed(range(len(numels)))]
    pool = Pool(numels, uses, settings)
    most = 0
    for unit in uses:
        pool.use(unit)
        pool.prefetch({unit})
        most = max(most, pool.live_numel)
        pool.leave(unit)
    return most, pool.gathers == len(numels)


class Pool:
    """`zero.pool.UnitPool` over numbers: a second pass, whose order is known from the first.

    Args:
        numels: elements of each unit.
        uses: numbers of units, in the order of a whole pass.
        settings: the budgets.
    """

    def __init__(self, numels: Sequence[int], uses: Sequence[int], settings: GatherSettings) -> None:
        self._numels = numels
        self._settings = settings
        self._trace = Trace(list(numels))
        for unit in uses:
            self._trace.use(unit)
        self._trace.close()
        self._lookahead = Lookahead(self._trace, numels, settings)
        self.live: dict[int, None] = {}
        """Units that are whole or on their way."""
        self._ahead: set[int] = set()
        self.live_numel = 0
        self.gathers = 0

    def use(self, unit: int, busy: Set[int] = frozenset()) -> None:
        """Make `unit` whole; `busy` units are in use and stay."""
        self._trace.use(unit)
        self._ahead.discard(unit)
        if unit not in self.live:
            self._make_room(self._numels[unit], -1, busy)
            self._add(unit)

    def prefetch(self, busy: Set[int]) -> None:
        """Gather ahead."""
        ahead_numel = sum(self._numels[each] for each in self._ahead)
        chosen = self._lookahead.choose(
            ahead_numel, self.live.__contains__, lambda numel, beyond: self._make_room(numel, beyond, busy)
        )
        for each in chosen:
            self._add(each)
        self._ahead.update(chosen)

    def leave(self, unit: int) -> None:
        """Nobody uses `unit`: it stays or goes."""
        if unit in self.live and not should_keep(self._trace.distance(unit), self.live_numel, self._settings):
            self._release(unit)

    def _add(self, unit: int) -> None:
        self.live[unit] = None
        self.live_numel += self._numels[unit]
        self.gathers += 1

    def _release(self, unit: int) -> None:
        del self.live[unit]
        self.live_numel -= self._numels[unit]
        self._lookahead.released(unit)

    def _make_room(self, numel: int, beyond: int, busy: Set[int]) -> bool:
        excess = self.live_numel + numel - self._settings.max_live_numel
        if excess > 0:
            others = [unit for unit in self.live if unit not in self._ahead and unit not in busy]
            idle = [Idle(unit, self._numels[unit], self._trace.distance(unit)) for unit in others]
            for unit in choose_victims(idle, excess, beyond):
                self._release(unit)
        return self.live_numel + numel <= self._settings.max_live_numel
