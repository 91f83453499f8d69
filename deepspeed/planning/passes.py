"""What one setting holds at the busiest moment of forward and backward: a walk through a timeline. Pure: no torch.

    timeline    enter ... leave ... backward ... back ... gradient ...         bytes of activations
    units       use        leave                 use      all arrived: leave   bytes of gathered parameters   (stage 3)
    buckets                                               waits until full     bytes of gradients

The moments are the engine's: `zero.coordinator` uses units, `zero.reducer` collects a bucket when all its gradients are
there, in an order that ranks share. Called by `states`. Does not live here: what is there at all times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from deepspeed.planning.gathered import Pool
from deepspeed.planning.timeline import BACKWARD, OVER, Mark, Timeline
from deepspeed.zero.prefetch import GatherSettings

__all__ = ["Busiest", "PlannedBucket", "PlannedUnit", "busiest_moment"]

_PLACES = 2  # buckets in flight, as `engine.partition`


@dataclass(frozen=True)
class PlannedBucket:
    """Gradients that leave autograd's hands together."""

    nbytes_of: dict[str, int]
    """Name of each parameter -> bytes of its gradient as autograd makes it."""

    order: int
    """Place of its first parameter in the model."""

    unit: int | None = None
    """The unit whose bucket it is; None: parameters are whole."""

    staged_nbytes: int = 0
    """This rank's mean on its way to the host."""


@dataclass(frozen=True)
class PlannedUnit:
    """Parameters that are gathered together."""

    numel: int
    nbytes: int
    """That a gather takes; 0 where shards are whole as they lie."""

    first: str
    """Module at whose start it is used."""

    last: str
    """Module with whose end that is over."""

    borrowed: tuple[int, ...] = ()
    """Other units that it needs meanwhile."""

    is_reported: bool = True
    """Whether all its parameters are trained: it is done in backward when their gradients were collected."""


class Busiest(NamedTuple):
    """Bytes of each at the moment when their sum is largest."""

    activation_nbytes: int = 0
    waiting_nbytes: int = 0
    """Gradients whose bucket is not full yet."""

    gathered_nbytes: int = 0
    staged_nbytes: int = 0
    """Means of full buckets on their way to the host."""

    stays_gathered: bool = True
    """Whether each unit is gathered once."""

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return self.activation_nbytes + self.waiting_nbytes + self.gathered_nbytes + self.staged_nbytes


def busiest_moment(
    timeline: Timeline,
    buckets: Sequence[PlannedBucket],
    units: Sequence[PlannedUnit],
    settings: GatherSettings,
    *,
    is_in_order: bool,
) -> Busiest:
    """Walk through one micro-batch.

    Args:
        timeline: of the activations.
        buckets: of gradients that wait; others are added up in place.
        units: by number.
        settings: of gathering.
        is_in_order: buckets are collected in the order of all ranks, not each as soon as it is full.
    """
    if not units:
        timeline = timeline.of_gradients
    numels = [unit.numel for unit in units]
    uses = _Noted()
    for _ in _walk(timeline, _Users(units, uses), _Waiting(buckets, is_in_order=is_in_order)):
        pass
    pool = Pool(numels, uses.recorded, settings)
    best, waiting = Busiest(), _Waiting(buckets, is_in_order=is_in_order)
    for activations in _walk(timeline, _Users(units, pool), waiting):
        gathered = sum(units[unit].nbytes for unit in pool.live) if units else 0
        found = Busiest(activations, waiting.nbytes, gathered, waiting.staged_nbytes)
        best = max(best, found, key=lambda each: each.nbytes)
    return best._replace(stays_gathered=pool.gathers <= len(units))


def _walk(timeline: Timeline, users: _Users, waiting: _Waiting) -> Iterator[int]:
    """Activations at each moment that may be the busiest."""
    living = 0
    for stretch in timeline.stretches:
        mark = stretch.mark
        users.at(mark)
        if mark.kind == "gradient":
            waiting.arrive(mark.name)
            yield living
            for unit in waiting.collect(mark.name):
                users.reported(unit)
        elif mark == OVER:
            waiting.end()
        yield living + stretch.peak_nbytes
        living += stretch.net_nbytes


class _Gatherer(Protocol):
    def use(self, unit: int, busy: Set[int]) -> None: ...

    def prefetch(self, busy: Set[int]) -> None: ...

    def leave(self, unit: int) -> None: ...


@dataclass
class _Noted:
    """Remembers the order of uses."""

    recorded: list[int] = field(default_factory=list)

    def use(self, unit: int, busy: Set[int]) -> None:
        self.recorded.append(unit)

    def prefetch(self, busy: Set[int]) -> None:
        pass

    def leave(self, unit: int) -> None:
        pass


class _Users:
    """Who uses a unit, as `zero.coordinator` has it."""

    def __init__(self, units: Sequence[PlannedUnit], pool: _Gatherer) -> None:
        self._units = units
        self._pool = pool
        self._first = {unit.first: number for number, unit in enumerate(units)}
        self._last = {unit.last: number for number, unit in enumerate(units)}
        self._running = [0] * len(units)
        self._held: set[int] = set()
        """Units that a running module uses."""

        self._lingering: set[int] = set()
        self._is_backward = False

    def at(self, mark: Mark) -> None:
        """What a mark means for units."""
        if mark == BACKWARD:
            self._is_backward = True
        elif mark.kind == "enter" and (unit := self._first.get(mark.name)) is not None:
            self._use(unit, +1)
        elif mark.kind == "leave" and (unit := self._last.get(mark.name)) is not None:
            self._leave(unit)
        elif mark.kind == "back" and (unit := self._last.get(mark.name)) is not None:
            self._end_others(unit)
            self._use(unit, 0)
            self._lingering.update(self._needed(unit))

    def reported(self, unit: int) -> None:
        """All gradients of a unit were collected."""
        if self._units[unit].is_reported and unit in self._lingering and not self._running[unit]:
            self._lingering.discard(unit)
            self._pool.leave(unit)

    def _needed(self, unit: int) -> tuple[int, ...]:
        return (unit, *self._units[unit].borrowed)

    def _busy(self) -> set[int]:
        return self._lingering | self._held

    def _use(self, unit: int, users: int) -> None:
        busy = self._busy() | set(self._needed(unit))
        for each in self._needed(unit):
            self._running[each] += users
            if users:
                self._held.add(each)
            self._pool.use(each, busy)
        self._pool.prefetch(busy)

    def _leave(self, unit: int) -> None:
        for each in self._needed(unit):
            self._running[each] = max(0, self._running[each] - 1)
            if self._running[each]:
                continue
            self._held.discard(each)
            if self._is_backward:
                self._lingering.add(each)  # recomputed: its backward follows
            elif each not in self._lingering:
                self._pool.leave(each)

    def _end_others(self, unit: int) -> None:
        """Of units that are not all trained no last gradient tells: they end when backward is past them."""
        name = self._units[unit].last
        for each in [*self._lingering]:
            is_around = not self._units[each].last or name.startswith(f"{self._units[each].last}.")
            if each != unit and not self._units[each].is_reported and not is_around and not self._running[each]:
                self._lingering.discard(each)
                self._pool.leave(each)


class _Waiting:
    """Gradients until their bucket is full, as `zero.reducer` has it."""

    def __init__(self, buckets: Sequence[PlannedBucket], *, is_in_order: bool) -> None:
        self._buckets = buckets
        self._bucket_of = {name: number for number, bucket in enumerate(buckets) for name in bucket.nbytes_of}
        self._all = [len(bucket.nbytes_of) for bucket in buckets]
        self._missing = [*self._all]
        self._order = sorted(range(len(buckets)), key=lambda number: -buckets[number].order)
        self._is_in_order = is_in_order
        self._next = 0
        self._missing_of_unit: dict[int, int] = {}
        for bucket in buckets:
            if bucket.unit is not None:
                self._missing_of_unit[bucket.unit] = self._missing_of_unit.get(bucket.unit, 0) + 1
        self.nbytes = 0
        self._staged = [0] * _PLACES

    @property
    def staged_nbytes(self) -> int:
        """A mean is there until its place is needed for another bucket, or backward is over."""
        return sum(self._staged)

    def arrive(self, name: str) -> None:
        """The gradient of a parameter is whole."""
        number = self._bucket_of.get(name)
        if number is not None:
            self.nbytes += self._buckets[number].nbytes_of[name]
            self._missing[number] -= 1

    def collect(self, name: str) -> Iterator[int]:
        """Let go of full buckets; gives units of which there is nothing left to come."""
        number = self._bucket_of.get(name)
        if number is None or self._missing[number]:
            return
        if not self._is_in_order:
            yield from self._let_go(number)
            return
        while self._next < len(self._order) and not self._missing[self._order[self._next]]:
            yield from self._let_go(self._order[self._next])
            self._next += 1

    def end(self) -> None:
        """Backward is over: what is there of a bucket that is not full goes as well, and another backward may follow."""
        self._missing, self._next = [*self._all], 0
        self.nbytes = 0

    def _let_go(self, number: int) -> Iterator[int]:
        bucket = self._buckets[number]
        self.nbytes -= sum(bucket.nbytes_of.values())
        self._staged = [*self._staged[1:], bucket.staged_nbytes]
        if bucket.unit is not None:
            self._missing_of_unit[bucket.unit] -= 1
            if not self._missing_of_unit[bucket.unit]:
                yield bucket.unit
