"""What to gather ahead, what to keep and what to release: decisions over plain numbers.

    uses to come     4   5   6   7 ...                  zero.trace
                     |   |   `-- would exceed prefetch_bucket_size: not yet
                     |   `------ gather now                                          Lookahead.choose
                     `---------- whole or on its way already
    after a use      next use within max_reuse_distance and room: keep, else release    should_keep
    no room          release idle units whose next use is farthest away                 choose_victims

Lives here: budgets and choices. Does not live here: the order of uses (`zero.trace`), carrying choices out
(`zero.coordinator`, which calls this).

[Note: not at once again] A unit that was released because its next use is far away is not gathered ahead before it is near
(within max_reuse_distance, or next), however large the prefetch bucket: releasing would have been for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed.config.zero import ZeroConfig
from deepspeed.zero.trace import Trace

__all__ = ["GatherSettings", "Idle", "Lookahead", "choose_victims", "should_keep"]


@dataclass(frozen=True)
class GatherSettings:
    """The keys of `zero_optimization` that rule gathering; numbers are elements."""

    prefetch_numel: int = 50_000_000
    """`prefetch_bucket_size`: most elements that are gathered ahead of their use."""

    max_live_numel: int = 1_000_000_000
    """`max_live_parameters`: above this, units are released as soon as they can be."""

    max_reuse_numel: int = 1_000_000_000
    """`max_reuse_distance`: a unit that is used again within this many elements stays gathered."""

    is_sequential: bool = False
    """`allgather_sequential`: one collective at a time, nothing ahead."""

    by_all_reduce: bool = False
    """`use_all_reduce_for_fetch_params`."""

    packs_saved: bool = True
    """`memory_efficient_linear`: autograd keeps the place of a gathered tensor, not its memory."""

    logs_changes: bool = False
    """`log_trace_cache_warnings`: say when units are used in another order than before."""

    @classmethod
    def from_config(cls, zero: ZeroConfig) -> GatherSettings:
        """Read the block `zero_optimization`."""
        return cls(
            prefetch_numel=zero.prefetch_bucket_size,
            max_live_numel=zero.max_live_parameters,
            max_reuse_numel=zero.max_reuse_distance,
            is_sequential=zero.allgather_sequential,
            by_all_reduce=zero.use_all_reduce_for_fetch_params,
            packs_saved=zero.memory_efficient_linear,
            logs_changes=zero.log_trace_cache_warnings,
        )


def should_keep(distance: int | None, live_numel: int, settings: GatherSettings) -> bool:
    """Whether a unit that has just been used stays gathered.

    Args:
        distance: elements used before its next use; None when no further use is foreseen.
        live_numel: elements gathered now, the unit's own included.
        settings: the budgets.
    """
    return distance is not None and distance <= settings.max_reuse_numel and live_numel <= settings.max_live_numel


class Idle(NamedTuple):
    """A gathered unit that nobody is using now."""

    unit: int
    numel: int
    distance: int | None
    """Elements used before its next use; None when none is foreseen."""


def choose_victims(idle: Iterable[Idle], excess_numel: int, beyond: int = -1) -> list[int]:
    """Idle units to release so that at least `excess_numel` elements come free, those needed last first.

    Args:
        idle: what may be released.
        excess_numel: how much must come free.
        beyond: only units whose next use is farther away than this.

    Returns:
        Their numbers; fewer elements than asked when there are no more.
    """
    victims: list[int] = []
    far = [each for each in idle if each.distance is None or each.distance > beyond]
    for each in sorted(far, key=lambda each: (each.distance is not None, -(each.distance or 0))):
        if excess_numel <= 0:
            break
        victims.append(each.unit)
        excess_numel -= each.numel
    return victims


class Lookahead:
    """Walks ahead of the uses of one trace. Each use is looked at once, unless a release makes it worth a second look.

    Args:
        trace: the uses.
        numels: elements of each unit, by number.
        settings: the budgets.
    """

    def __init__(self, trace: Trace, numels: Sequence[int], settings: GatherSettings) -> None:
        self._trace = trace
        self._numels = numels
        self._budget_numel = 0 if settings.is_sequential else settings.prefetch_numel
        self._near_numel = settings.max_reuse_numel
        self._cursor = 0

    def choose(
        self,
        ahead_numel: int,
        is_here: Callable[[int], bool],
        make_room: Callable[[int, int], bool],
        take_buffers: Callable[[int], bool] = lambda unit: True,
    ) -> list[int]:
        """Units to start gathering now, in order of use.

        Args:
            ahead_numel: elements that were gathered ahead and are not in use yet.
            is_here: whether a unit, by number, is gathered or on its way.
            make_room: called with elements, of this unit and those chosen before it, and the distance of their use; whether
                they fit under max_live_parameters, perhaps because units used later than that were released.
            take_buffers: called with a unit that would be started; whether there are buffers left to read it through, where
                its shards rest outside memory.
        """
        trace, chosen, chosen_numel = self._trace, list[int](), 0
        if not self._budget_numel:
            return chosen
        self._cursor = max(self._cursor, trace.position + 1)
        while self._cursor < trace.length:
            unit = trace.unit_at(self._cursor)
            if not is_here(unit) and unit not in chosen:
                numel, distance = self._numels[unit], trace.distance_to(self._cursor)
                if ahead_numel + numel > self._budget_numel:
                    break
                if ahead_numel and distance > self._near_numel and trace.was_used(unit):
                    break  # [Note: not at once again]
                if not take_buffers(unit) or not make_room(chosen_numel + numel, distance):
                    break
                chosen.append(unit)
                ahead_numel, chosen_numel = ahead_numel + numel, chosen_numel + numel
            self._cursor += 1
        return chosen

    def released(self, unit: int) -> None:
        """Unit `unit` is not gathered any more: its next use has to be looked at again."""
        place = self._trace.next_place(unit)
        if place is not None:
            self._cursor = min(self._cursor, place)

    def restart(self) -> None:
        """The trace was closed."""
        self._cursor = 0
