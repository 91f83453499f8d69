"""Stand-ins for the flat buffers of `comm.algorithms`: no processes, every launch on record.

    RecordingReducer, RecordingScatterer    all ranks are pretended to hold the same; what they do is in `journal`
    Lockstep                                several ranks in one thread, in turns: the test drives each of them

A lockstep rank that waits for what a peer has not launched fails the test where a real one would wait for ever. Memory that
the protocol calls undefined is filled with NaN, and a contribution that changed while a peer could read it is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepspeed.topology.mesh import AxisGroup


class RecordingReducer:
    """A `FlatAllReducer` whose mean is what is there; keeps launches and waits."""

    def __init__(self, numel: int, dtype: torch.dtype = torch.float32, journal: list[str] | None = None) -> None:
        self.buffer = torch.zeros(numel, dtype=dtype)
        self.journal: list[str] = [] if journal is None else journal
        self.is_closed = False

    def launch(self, start: int, stop: int) -> _RecordedWork:
        """Put the launch on record."""
        self.journal.append(f"launch {start}:{stop}")
        return _RecordedWork(self.journal, f"wait {start}:{stop}")

    def close(self) -> None:
        """Remember it."""
        self.is_closed = True


class _RecordedWork:
    def __init__(self, journal: list[str], line: str) -> None:
        self._journal, self._line = journal, line

    def wait(self) -> None:
        self._journal.append(self._line)


class FailingReducer(RecordingReducer):
    """Its second launch breaks when it is waited for, as when a peer dies."""

    def launch(self, start: int, stop: int) -> _RecordedWork:
        """A work that raises, from the second on."""
        work = super().launch(start, stop)
        return work if len(self.journal) == 1 else _FailingWork(self.journal, "never")


class _FailingWork(_RecordedWork):
    def wait(self) -> None:
        raise RuntimeError("peer closed the connection")


# -- several ranks in one thread --------------------------------------------------------------------------------------


@dataclass
class _Launch:
    """One range that one rank has launched."""

    start: int
    stop: int
    into: Tensor | None
    accumulate: bool
    contribution: Tensor
    is_reduced: bool = False


@dataclass
class Lockstep:
    """The shared memory of `world_size` ranks: `scatterer(rank)` and `gatherer(rank)` are each rank's view of it."""

    world_size: int
    numel: int
    dtype: torch.dtype = torch.float32
    rows: list[Tensor] = field(default_factory=list)
    launches: list[list[_Launch]] = field(default_factory=list)
    published: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = [torch.zeros(self.numel, dtype=self.dtype) for _ in range(self.world_size)]
        self.launches = [[] for _ in range(self.world_size)]
        self.published = [0] * self.world_size

    def scatterer(self, rank: int) -> LockstepScatterer:
        """The `FlatReduceScatterer` of one rank."""
        return LockstepScatterer(self, rank)

    def gatherer(self, rank: int) -> LockstepGatherer:
        """The `FlatGatherer` of one rank."""
        return LockstepGatherer(self, rank)

    def reduce(self, rank: int, number: int) -> None:
        """Give `rank` its part of launch `number`."""
        waiting_for = [peer for peer, made in enumerate(self.launches) if len(made) <= number]
        assert not waiting_for, f"rank {rank} waits for launch {number} of ranks {waiting_for}, which they have not made"
        launch = self.launches[rank][number]
        if launch.is_reduced:
            return
        of_ranks = [made[number] for made in self.launches]
        assert len({(one.start, one.stop) for one in of_ranks}) == 1, "ranks launch different ranges"
        numel = (launch.stop - launch.start) // self.world_size
        begin = launch.start + rank * numel
        total = torch.zeros(numel, dtype=torch.float64)
        for peer, one in enumerate(of_ranks):
            part = self.rows[peer][begin : begin + numel]  # each peer has written its own part alone, if anything
            assert torch.equal(part, one.contribution[rank * numel : (rank + 1) * numel]), "written while a peer reads it"
            total += part.double()
        mean = (total / self.world_size).to(self.dtype)
        into = self.rows[rank][begin : begin + numel] if launch.into is None else launch.into
        into.add_(mean) if launch.accumulate else into.copy_(mean)
        launch.is_reduced = True

    def free(self, rank: int, number: int) -> None:
        """All ranks reduce launch `number`; then nothing of `rank`'s range means anything but a part reduced in place."""
        for peer in range(self.world_size):
            self.reduce(peer, number)
        launch = self.launches[rank][number]
        numel = (launch.stop - launch.start) // self.world_size
        own = slice(launch.start + rank * numel, launch.start + (rank + 1) * numel)
        kept = self.rows[rank][own].clone()
        is_zero = torch.stack([made[number].contribution == 0 for made in self.launches]).all(0)  # padding stays zero
        self.rows[rank][launch.start : launch.stop] = torch.where(is_zero, 0.0, torch.nan)
        if launch.into is None:
            self.rows[rank][own] = kept


class LockstepScatterer:
    """A `FlatReduceScatterer` of ranks that a test drives in turns."""

    def __init__(self, ranks: Lockstep, rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        self.buffer = ranks.rows[rank]
        self.is_closed = False
        self._busy: dict[int, tuple[int, int]] = {}

    def launch(self, start: int, stop: int, into: Tensor | None = None, *, accumulate: bool = False) -> _LockstepWork:
        """Contribute `buffer[start:stop]`."""
        assert (stop - start) % self._ranks.world_size == 0
        for low, high in self._busy.values():
            assert high <= start or stop <= low, "launched over a range that is not free"
        made = self._ranks.launches[self._rank]
        made.append(_Launch(start, stop, into, accumulate, self.buffer[start:stop].clone()))
        self._busy[len(made) - 1] = (start, stop)
        return _LockstepWork(self, self._ranks, self._rank, len(made) - 1)

    def freed(self, number: int) -> None:
        """Its range may be launched again."""
        self._busy.pop(number, None)

    def close(self) -> None:
        """Remember it."""
        self.is_closed = True


class _LockstepWork:
    def __init__(self, scatterer: LockstepScatterer, ranks: Lockstep, rank: int, number: int) -> None:
        self._scatterer, self._ranks, self._rank, self._number = scatterer, ranks, rank, number
        self._is_free = False

    def wait(self) -> None:
        self._ranks.reduce(self._rank, self._number)

    def wait_free(self) -> None:
        if not self._is_free:
            self._is_free = True
            self._ranks.free(self._rank, self._number)
            self._scatterer.freed(self._number)


class LockstepGatherer:
    """A `FlatGatherer` of ranks that a test drives in turns."""

    def __init__(self, ranks: Lockstep, rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        self.buffer = ranks.rows[rank]
        self.is_published = self.is_closed = False

    def begin_update(self) -> None:
        """Take the version back."""
        self.is_published = False

    def publish(self) -> None:
        """Let peers read."""
        assert not self.is_published, "published twice"
        self.is_published = True
        self._ranks.published[self._rank] += 1

    def gather_in_place(self, start: int, stop: int) -> _Copies:
        """Copy the peers' parts when waited for."""
        assert self.is_published
        numel = (stop - start) // self._ranks.world_size
        parts = [slice(start + peer * numel, start + (peer + 1) * numel) for peer in range(self._ranks.world_size)]
        rows = self._ranks.rows
        copies = [(self.buffer[part], rows[peer][part]) for peer, part in enumerate(parts) if peer != self._rank]
        return _Copies(self._ranks, self._rank, copies)

    def gather(self, start: int, stop: int, into: Tensor) -> _Copies:
        """Copy everybody's range when waited for."""
        assert self.is_published
        targets = into.view(self._ranks.world_size, stop - start)
        copies = [(target, row[start:stop]) for target, row in zip(targets, self._ranks.rows, strict=True)]
        return _Copies(self._ranks, self._rank, copies)

    def view(self, start: int, stop: int) -> None:
        """There are other ranks' parts."""

    def close(self) -> None:
        """Remember it."""
        self.is_closed = True


class _Copies:
    def __init__(self, ranks: Lockstep, rank: int, copies: list[tuple[Tensor, Tensor]]) -> None:
        self._ranks, self._version, self._copies = ranks, ranks.published[rank], copies

    def wait(self) -> None:
        behind = [peer for peer, version in enumerate(self._ranks.published) if version < self._version]
        assert not behind, f"waits for version {self._version} of ranks {behind}, which they have not published"
        for target, source in self._copies:
            target.copy_(source)


# -- around them ------------------------------------------------------------------------------------------------------


def pretend_axis(size: int, rank: int = 0) -> AxisGroup:
    """An axis of `size` ranks without any process behind it."""
    return AxisGroup(range(size), rank, group=object())  # type: ignore[arg-type]
