"""What lives when during one forward and backward: bytes between marks. Pure: no torch.

    mark      enter h.0 | leave h.0 | enter h.1 ... | backward | back h.1 | gradient h.1.w | back h.0 | ...
    bytes         +9 -2 |        +1 |       +9 -2   |       +5 |    +4 -9 |             -4 |    +4 -9 | ...

    enter, leave    a module's forward, also where it is recomputed in backward
    backward        the loss is there
    back            the gradient of one of a module's outputs is there
    gradient        the gradient of a parameter is whole; its bytes go in this stretch, for who keeps it counts it
    over            a backward has ended: more than one is in the timeline of a pipeline's stage

Blocks that repeat are traced as three of them ([Note: the middle block]), so that a deep model costs what a shallow one
does.

[Note: the middle block] Of three alike blocks the one in the middle has a block before and after it, as all but the first
and the last of a deep model have. Its stretches of forward, and those of backward, are repeated under the names of the
others. What was made in it and is let go outside the three blocks (a cache that ends with the forward's outputs, weights
that autocast has cast) was made in each of the others as well, and so counts as often.

Made by `tracing`, walked through by `passes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

__all__ = ["BACKWARD", "OVER", "TRACED_BLOCKS", "Mark", "Recorded", "Stretch", "Timeline", "repeated", "timeline_of"]

TRACED_BLOCKS = 3


class Mark(NamedTuple):
    """What begins a stretch."""

    kind: Literal["start", "enter", "leave", "backward", "back", "gradient", "over"]
    name: str = ""
    """Of the module or the parameter."""


BACKWARD, OVER = Mark("backward"), Mark("over")


class Stretch(NamedTuple):
    """From one mark to the next."""

    mark: Mark
    peak_nbytes: int
    """The most over what lived at the mark; at least 0."""

    net_nbytes: int
    """What it leaves behind."""

    sent_nbytes: int = 0
    """What its collectives send."""


@dataclass
class Recorded:
    """A stretch as it was traced."""

    mark: Mark
    changes: list[tuple[int, int]] = field(default_factory=list)
    """Bytes that came (or, below 0, went), and the number of the stretch in which they came."""

    sent_nbytes: int = 0
    summed_nbytes: int = 0
    """Of the largest tensor that is added up over ranks."""


@dataclass(frozen=True)
class Timeline:
    """One micro-batch on one rank, or one batch of a pipeline's stage.

    Without what is kept elsewhere: parameters, buckets, gradients that are whole.
    """

    stretches: tuple[Stretch, ...]
    summed_nbytes: int = 0
    """Of the largest tensor that is added up over ranks within it."""

    @cached_property
    def peak_nbytes(self) -> int:
        """The most at any moment."""
        living = peak = 0
        for stretch in self.stretches:
            peak = max(peak, living + stretch.peak_nbytes)
            living += stretch.net_nbytes
        return peak

    @cached_property
    def kept_nbytes(self) -> int:
        """Held from forward to backward."""
        living = 0
        for stretch in self.stretches:
            if stretch.mark == BACKWARD:
                break
            living += stretch.net_nbytes
        return living

    @cached_property
    def sent_nbytes(self) -> int:
        """What collectives within it send."""
        return sum(stretch.sent_nbytes for stretch in self.stretches)

    @cached_property
    def of_gradients(self) -> Timeline:
        """The same with no marks but those of gradients, which is all that matters where nothing is gathered."""
        joined: list[Stretch] = []
        for stretch in self.stretches:
            if joined and stretch.mark.kind not in ("gradient", "over"):
                mark, peak, net, sent = joined[-1]
                peak = max(peak, net + stretch.peak_nbytes)
                joined[-1] = Stretch(mark, peak, net + stretch.net_nbytes, sent + stretch.sent_nbytes)
            else:
                joined.append(stretch)
        return Timeline(tuple(joined))


def timeline_of(recorded: Sequence[Recorded]) -> Timeline:
    """As it was traced."""
    return Timeline(
        tuple(_summed(each.mark, (nbytes for nbytes, _ in each.changes), each.sent_nbytes) for each in recorded),
        max(each.summed_nbytes for each in recorded),
    )


def repeated(recorded: Sequence[Recorded], name: str, count: int) -> Timeline | None:
    """What `count` blocks would give, from the trace of three: [Note: the middle block].

    Args:
        recorded: a trace in which the list `name` has three blocks.
        name: of the list of blocks.
        count: at least three.

    Returns:
        None where the trace does not have the blocks one after another, in backward the other way round.
    """
    zones = _Zones.of([each.mark for each in recorded], name)
    if zones is None:
        return None
    stretches: list[Stretch] = []
    for at, each in enumerate(recorded):
        if at in zones.forward or at in zones.backward:
            continue
        times = 1 if zones.is_beside(at) else count - 2
        changes = (nbytes * (times if zones.is_middle(origin) else 1) for nbytes, origin in each.changes)
        if at in (zones.forward.stop, zones.backward.stop):
            is_forward = at == zones.forward.stop
            numbers = range(1, count - 1) if is_forward else range(count - 2, 0, -1)
            middle = recorded[zones.forward.start : zones.forward.stop] if is_forward else zones.of_backward(recorded)
            parts = [_summed(part.mark, (nbytes for nbytes, _ in part.changes), part.sent_nbytes) for part in middle]
            stretches += [_renamed(part, f"{name}.1", f"{name}.{number}") for number in numbers for part in parts]
        mark = _renamed_mark(each.mark, f"{name}.2", f"{name}.{count - 1}")
        stretches.append(_summed(mark, changes, each.sent_nbytes))
    return Timeline(tuple(stretches), max(each.summed_nbytes for each in recorded))


class _Zones(NamedTuple):
    """Where the blocks lie in a trace of three; ranges of stretches."""

    forward: range
    """Of the middle block."""

    backward: range
    last_forward: range
    first_backward: range
    """Of the last block; the middle one's follows."""

    last_backward: range

    @classmethod
    def of(cls, marks: Sequence[Mark], name: str) -> _Zones | None:
        """Find them."""
        start = [_first(marks, Mark("enter", f"{name}.{number}"), 0) for number in range(TRACED_BLOCKS)]
        over = _first(marks, BACKWARD, 0)
        end = _first(marks, Mark("leave", f"{name}.2"), 0)
        back = [_first(marks, Mark("back", f"{name}.{number}"), over or 0) for number in range(TRACED_BLOCKS)]
        borders = [*start, end, over, back[2], back[1], back[0]]
        places = [each for each in borders if each is not None]
        if len(places) < len(borders) or places != sorted(set(places)):
            return None
        first, second, third, left, begin, *backs = places
        own = (f"{name}.0", f"{name}.0.")
        last = max(
            at for at, mark in enumerate(marks) if at >= backs[2] and (mark.name == own[0] or mark.name.startswith(own[1]))
        )
        found = cls(
            range(second, third),
            range(backs[1], backs[2]),
            range(third, left + 1),
            range(backs[0], backs[1]),
            range(backs[2], last + 1),
        )
        return found if found._is_regular(marks, name, range(first, begin)) else None

    def _is_regular(self, marks: Sequence[Mark], name: str, forward: range) -> bool:
        """Whether the middle block runs once, and its stretches are all its own."""
        own, below = f"{name}.1", f"{name}.1."
        runs = sum(marks[at] == Mark("enter", own) for at in forward)
        middle = [marks[at].name for at in (*self.forward, *self.backward)]
        return runs == 1 and all(each == own or each.startswith(below) for each in middle)

    def of_backward(self, recorded: Sequence[Recorded]) -> Sequence[Recorded]:
        """The middle block's stretches of backward."""
        return recorded[self.backward.start : self.backward.stop]

    def is_middle(self, at: int) -> bool:
        """Whether a stretch is the middle block's."""
        return at in self.forward or at in self.backward

    def is_beside(self, at: int) -> bool:
        """Whether it is of a block beside it, which lets go what one neighbour alone has made."""
        return at in self.last_forward or at in self.first_backward or at in self.last_backward


def _first(marks: Sequence[Mark], mark: Mark, begin: int) -> int | None:
    return next((at for at in range(begin, len(marks)) if marks[at] == mark), None)


def _renamed(part: Stretch, old: str, new: str) -> Stretch:
    return part._replace(mark=_renamed_mark(part.mark, old, new))


def _renamed_mark(mark: Mark, old: str, new: str) -> Mark:
    is_below = mark.name == old or mark.name.startswith(f"{old}.")
    return Mark(mark.kind, new + mark.name[len(old) :]) if is_below else mark


def _summed(mark: Mark, changes: Iterator[int], sent_nbytes: int) -> Stretch:
    living = peak = 0
    for nbytes in changes:
        living += nbytes
        peak = max(peak, living)
    return Stretch(mark, peak, living, sent_nbytes)
