"""Flat buffers that ranks share: what they can do, what a caller may ask, and the case of a single rank.

    FlatAllReducer         buffer[start:stop] becomes the mean over ranks, on every rank                (ZeRO stage 0)
    FlatReduceScatterer    rank r gets the r-th of W equal parts of the mean                            (stages 1 to 3)
    FlatGatherer           what ranks have published is brought together: in place, or into other memory (stages 1 to 3)

        reduce-scatter of a range, W = 2                    gather in place                  gather
        rank 0  [ a0 | a1 ] -> (a0 + b0) / 2                [ a0 | ?? ] -> [ a0 | b1 ]       [ a ] -> into [ a | b ]
        rank 1  [ b0 | b1 ] -> (a1 + b1) / 2                [ ?? | b1 ] -> [ a0 | b1 ]       [ b ] -> into [ a | b ]

Lives here: the protocols, the checks of arguments, the life cycle of what is published, and the versions for one rank.
Does not live here: the choice (`comm.algorithms`, which callers use), shared memory (`comm.shared_reducer`,
`comm.shared_shards`), the back end (`comm.backend`, `comm.backend_shards`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from deepspeed.comm.mean import check_range
from deepspeed.errors import ArgumentError, UsageError

__all__ = [
    "DONE",
    "FlatAllReducer",
    "FlatGatherer",
    "FlatReduceScatterer",
    "LocalGatherer",
    "LocalReduceScatterer",
    "LocalReducer",
    "Publication",
    "Record",
    "ShardWork",
    "Work",
    "check_gathered",
    "check_parts",
    "check_target",
    "record_nothing",
]

Record = Callable[[int, int], Callable[[], None] | None]
"""Called with bytes and ranks of each launch; what it returns is called when the result is there. For the comms log."""


def record_nothing(_nbytes: int, _world_size: int) -> None:
    """The `Record` of those who keep no log."""


# -------------------------------------------------------------------- what a caller sees


class Work(Protocol):
    """Something that goes on while the caller does other things."""

    def wait(self) -> None:
        """Block the caller (on a device: its current stream) until the result is there."""


class ShardWork(Protocol):
    """A reduce-scatter of one range that goes on while the caller does other things."""

    def wait(self) -> None:
        """Block the caller (on a device: its current stream) until this rank's part holds the result."""

    def wait_free(self) -> None:
        """Block as `wait` does and until nobody reads the range of this rank's buffer any more: it may be written."""


class FlatAllReducer(Protocol):
    """A flat buffer whose ranges become the mean over the ranks of a group."""

    @property
    def buffer(self) -> torch.Tensor:
        """1-D, zeroed at first; views of it serve as gradients."""

    def launch(self, start: int, stop: int) -> Work:
        """Start the in-place mean of `buffer[start:stop]`.

        Every rank of the group launches the same ranges in the same order, and touches a range in flight not before its
        `wait()` has returned. Between a launch and its wait no rank may block on what another does only after its own wait.
        """

    def close(self) -> None:
        """Let go of what is shared with other ranks. Not collective."""


class FlatReduceScatterer(Protocol):
    """A flat buffer of which each rank gets its part of the mean over the W ranks of a group, range by range."""

    @property
    def buffer(self) -> torch.Tensor:
        """1-D, zeroed at first: what this rank contributes."""

    def launch(self, start: int, stop: int, into: torch.Tensor | None = None, *, accumulate: bool = False) -> ShardWork:
        """Start the mean of `buffer[start:stop]` over the group; rank r gets the r-th of W equal parts.

        Every rank launches the same ranges in the same order and waits for them in any order. A range may overlap an older
        one only after the older one's `wait_free()`. Between a launch and its wait no rank may block on what another does
        only after its own wait. From the launch on the range of the buffer is undefined (but for a part reduced in place)
        until it is written again.

        Args:
            start: first element.
            stop: one past the last; `stop - start` is a multiple of W.
            into: 1-D, `(stop - start) / W` elements of any floating dtype on the buffer's device: set to this rank's part,
                which is rounded to the buffer's dtype first. None: in place, in this rank's own part of its own buffer.
            accumulate: add to `into` instead; several ranges in flight may add to the same memory.

        Raises:
            ArgumentError: a range or `into` that does not fit.
            UsageError: closed, or the range overlaps one that is not free.
            CommError: other ranks died, are late, or launch other ranges. `wait` and `wait_free` raise it too.
        """

    def close(self) -> None:
        """Let go of what is shared with other ranks. Not collective."""


class FlatGatherer(Protocol):
    """A flat buffer that this rank publishes, and the way to read those of the W ranks of a group.

    All ranks go through the same versions together: write the buffer, `publish`, gather as often as needed,
    `begin_update`, write, `publish`, ... The first version is written after construction. One buffer is gathered either in
    place (it is the whole) or into other memory (it is a shard), not both: the former changes what the latter reads.
    """

    @property
    def buffer(self) -> torch.Tensor:
        """1-D, zeroed at first: what this rank publishes."""

    def begin_update(self) -> None:
        """Block until no rank reads the current version of this buffer: it may be written then.

        Every rank calls it, once per update, before it writes. Gathers that were started and not waited for are completed.
        While nothing is published (at the start, or called twice) it returns at once.
        """

    def publish(self) -> None:
        """Say that this buffer is final until the next `begin_update`. Every rank calls it; it does not block."""

    def gather_in_place(self, start: int, stop: int) -> Work:
        """Start to complete `buffer[start:stop]`, of which rank q's buffer has the q-th of W equal parts right.

        After `wait()` all of the range is right on this rank. Every rank calls it, in the same order; the other parts are
        written at some time between the call and the end of `wait`.
        """

    def gather(self, start: int, stop: int, into: torch.Tensor) -> Work:
        """Start to fill `into` with `buffer[start:stop]` of all ranks, in rank order.

        `into`: 1-D, W * (stop - start) elements of the buffer's dtype, this rank's own memory, on the buffer's device, or on
        that which the gatherer was built for where the buffer rests elsewhere; undefined until `wait()` returns. Every rank
        calls it, in the same order: the back end needs that. Where memory is shared a rank may gather alone.
        """

    def view(self, start: int, stop: int) -> torch.Tensor | None:
        """What `gather` would bring, where that is this buffer already: memory of it, under a storage of its own.

        None where it must be gathered; the same on all ranks. Of no use after the next `begin_update`: it changes then.
        """

    def close(self) -> None:
        """Let go of what is shared with other ranks. Not collective."""


# -------------------------------------------------------------------- what a caller may ask


def check_parts(start: int, stop: int, numel: int, world_size: int) -> None:
    """Raise ArgumentError unless `[start, stop)` lies in a buffer of `numel` and falls into `world_size` equal parts."""
    check_range(start, stop, numel)
    if (stop - start) % world_size:
        raise ArgumentError(
            f"range [{start}, {stop}) of {stop - start} elements given for a group of {world_size} ranks; needed a multiple "
            f"of {world_size}, one equal part per rank. Pad the buffer (sharding.FlatLayout does)."
        )


def check_target(into: torch.Tensor | None, numel: int, device: torch.device, accumulate: bool) -> None:
    """Raise ArgumentError unless a part of `numel` elements can be written (or added) to `into`."""
    if into is None:
        if accumulate:
            raise ArgumentError("accumulate=True given without `into`; needed a tensor to add to. Pass it as `into`.")
        return
    if into.shape != (numel,) or not into.is_floating_point() or into.device != device:
        raise ArgumentError(
            f"into= is {into.dtype} of shape {tuple(into.shape)} on {into.device}; needed a floating dtype, shape "
            f"({numel},) on {device}: this rank's part of the range. Pass a view of that many elements."
        )


def check_gathered(into: torch.Tensor, numel: int, buffer: torch.Tensor) -> None:
    """Raise ArgumentError unless `into` has room for `numel` elements, in the dtype and on the device of `buffer`."""
    if into.shape != (numel,) or into.dtype != buffer.dtype or into.device != buffer.device or not into.is_contiguous():
        raise ArgumentError(
            f"into= is {into.dtype} of shape {tuple(into.shape)} on {into.device}; needed contiguous {buffer.dtype}, shape "
            f"({numel},) on {buffer.device}: the range of every rank. Pass a view of that many elements."
        )


class Publication:
    """The life of what a gatherer publishes.

    WRITING --- publish() ---> PUBLISHED (version + 1) --- begin_update() ---> WRITING
       ^                                                                         |
       +------------------------------ version 0 starts here ------------------- +
    """

    def __init__(self) -> None:
        """Start in WRITING, with no version."""
        self.version = 0
        self.is_published = False

    def check_published(self) -> None:
        """Raise UsageError while the buffer may be written."""
        if not self.is_published:
            raise UsageError(
                f"a gather was asked for while version {self.version + 1} of the buffer is being written; needed a version "
                "that all ranks have finished. Call publish() when the buffer is final, then gather."
            )

    def check_writing(self) -> None:
        """Raise UsageError when the buffer is published already."""
        if self.is_published:
            raise UsageError(
                f"publish() was called while version {self.version} is published, which other ranks may be reading. Call "
                "begin_update() before the buffer is written again."
            )

    def publish(self) -> None:
        """Go on to the next version; `check_writing` has passed."""
        self.version += 1
        self.is_published = True

    def begin_update(self) -> None:
        """Take the version back: nobody reads it any more."""
        self.is_published = False


# -------------------------------------------------------------------- one rank alone


class _Done:
    """A work that is over before it began."""

    def wait(self) -> None:
        """Return."""

    def wait_free(self) -> None:
        """Return."""


DONE = _Done()


class LocalReducer:
    """The reducer of a single rank: the mean is there already."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the buffer."""
        self.buffer = torch.zeros(numel, dtype=dtype, device=device)

    def launch(self, start: int, stop: int) -> Work:
        """See `FlatAllReducer`."""
        check_range(start, stop, self.buffer.numel())
        return DONE

    def close(self) -> None:
        """See `FlatAllReducer`."""


class LocalReduceScatterer:
    """The reduce-scatterer of a single rank: its part is the whole range, and the mean is there already."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the buffer."""
        self.buffer = torch.zeros(numel, dtype=dtype, device=device)

    def launch(self, start: int, stop: int, into: torch.Tensor | None = None, *, accumulate: bool = False) -> ShardWork:
        """See `FlatReduceScatterer`; a given `into` is written at once, nothing else is copied."""
        check_range(start, stop, self.buffer.numel())
        check_target(into, stop - start, self.buffer.device, accumulate)
        if into is not None:
            source = self.buffer[start:stop]
            into.add_(source) if accumulate else into.copy_(source)
        return DONE

    def close(self) -> None:
        """See `FlatReduceScatterer`."""


class LocalGatherer:
    """The gatherer of a single rank: its buffer is all there is."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, *, at_rest: torch.Tensor | None = None) -> None:
        """Allocate the buffer, or take `at_rest`, which is gathered from into memory on `device`."""
        self.buffer = torch.zeros(numel, dtype=dtype, device=device) if at_rest is None else at_rest
        self._sample = torch.empty(0, dtype=dtype, device=device)
        # A device's storages may shrink and come back elsewhere (`zero.absence`), with no word to other storages there.
        self._lends_views = at_rest is None and device.type == "cpu"
        self._publication = Publication()

    def begin_update(self) -> None:
        """See `FlatGatherer`."""
        self._publication.begin_update()

    def publish(self) -> None:
        """See `FlatGatherer`."""
        self._publication.check_writing()
        self._publication.publish()

    def gather_in_place(self, start: int, stop: int) -> Work:
        """See `FlatGatherer`; nothing is copied."""
        self._publication.check_published()
        check_range(start, stop, self.buffer.numel())
        return DONE

    def gather(self, start: int, stop: int, into: torch.Tensor) -> Work:
        """See `FlatGatherer`; copied at once."""
        self._publication.check_published()
        check_range(start, stop, self.buffer.numel())
        check_gathered(into, stop - start, self._sample)
        into.copy_(self.buffer[start:stop], non_blocking=True)
        return DONE

    def view(self, start: int, stop: int) -> torch.Tensor | None:
        """See `FlatGatherer`; None for what is not in this device's memory, and on accelerators."""
        self._publication.check_published()
        check_range(start, stop, self.buffer.numel())
        if not self._lends_views:
            return None
        size = self.buffer.itemsize
        return self._sample.new_empty(0).set_(self.buffer.untyped_storage()[start * size : stop * size])

    def close(self) -> None:
        """See `FlatGatherer`."""
