"""A copy of what a rank writes, in host memory, so that training goes on while it is written.

    pieces on any device --- one pass ---> | piece | piece | ... |  one flat buffer, filled again by each snapshot

The buffer is kept from one save to the next: fresh memory costs several times the copy, because the system clears each page
of it. So the first one is made ready ahead, in a thread (`prepare`), and later ones allocate nothing. Where an accelerator
holds the state, the buffer is locked into memory and the copies run beside each other.

The copy runs in a thread, outside the interpreter's lock, while the ranks agree on what they are about to write:

    thread     | shared pieces | private pieces: masters, moments |
    caller     agree --------- wait_shared | forward, backward --- wait | update ...

[Note: lazy copies] Only an update writes masters and moments, so they are copied while forward and backward run
(DataStates-LLM, arXiv:2406.10707); what the caller could write before that is copied first. A private tensor that was
written all the same, through a reference of the caller's own, has another version afterwards: such a snapshot is refused,
never written. Copies from a device are queued ahead of whatever comes after them on its stream, so no caller waits.

Does not live here: when to take one (`background`). One object per rank; its methods are called by one thread.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.save.piece import Piece
from deepspeed.common.deferred import DeferredTensor, loaded
from deepspeed.common.logging import get_logger
from deepspeed.common.wording import some
from deepspeed.errors import CheckpointError
from deepspeed.ops.host_copy import copy_host

__all__ = ["Snapshot", "SnapshotMemory", "needed_nbytes"]

_ALIGNMENT_NBYTES = 64
_SPARE_NBYTES = 1 << 20
_SPARE_SHARE = 64
_NAMES_SHOWN = 3

_logger = get_logger(__name__)


@dataclass(frozen=True)
class _Private:
    """One copy of what only updates write."""

    name: str
    to: Tensor
    of: Tensor
    version: int


class Snapshot:
    """Pieces that are being copied to places of their own.

    Args:
        pieces: what is copied.
        places: the same pieces with the memory that it goes to.
    """

    def __init__(self, pieces: Sequence[Piece], places: list[Piece]) -> None:
        self._places = places
        moves = [(loaded(to.data), of) for to, of in zip(places, pieces, strict=True) if of.data.numel()]
        for to, of in moves:
            if isinstance(of.data, Tensor) and _is_on_a_device(of):
                to.copy_(of.data.detach(), non_blocking=True)
        self._from_device: Any = None
        if _is_any_on_a_device(pieces):
            self._from_device = get_accelerator().Event()
            self._from_device.record()
        self._goes_on = threading.Event()
        weakref.finalize(self, self._goes_on.set)  # of one that nobody took over, the thread must not wait for ever
        shared, private = [], []
        for to, of in moves:
            if isinstance(of.data, Tensor) and of.is_private and not _is_on_a_device(of):
                private.append(_Private(of.name, to, of.data.detach(), _version(of.data)))
            elif not _is_on_a_device(of):
                shared.append((to, of.data))
        thread = ThreadPoolExecutor(1, "deepspeed snapshot")  # one, so that what the caller waits for comes first
        self._shared = thread.submit(_copy, shared)
        self._private = thread.submit(_copy_private, private, self._goes_on)
        thread.shutdown(wait=False)

    def wait_shared(self) -> None:
        """Block until what the caller may write has been copied, then let the rest be. What fails, `pieces` raises."""
        futures.wait([self._shared])
        self._goes_on.set()

    def wait(self) -> None:
        """Block until nothing of the state is read any more, on a device the current stream. What fails, `pieces` raises."""
        self._goes_on.set()
        futures.wait([self._shared, self._private])
        if self._from_device is not None:
            self._from_device.wait()  # the state may be changed on another stream than the one that it is copied on

    def pieces(self) -> list[Piece]:
        """The pieces with data of their own; blocks until the copy is complete.

        Raises:
            CheckpointError: a private piece was changed meanwhile.
            FileIoError: a deferred one could not be read.
        """
        self._goes_on.set()
        futures.wait([self._shared, self._private])  # both, whichever fails: the next snapshot writes to the same places
        self._shared.result()
        self._private.result()
        if self._from_device is not None:
            self._from_device.synchronize()
        return self._places


def _copy(pairs: Sequence[tuple[Tensor, Tensor | DeferredTensor]]) -> None:
    """Copy within the host; what is deferred is read, one tensor at a time."""
    copy_host([(to, of.detach()) for to, of in pairs if isinstance(of, Tensor)])
    for to, of in pairs:
        if isinstance(of, DeferredTensor):
            to.copy_(of.read())


def _copy_private(moves: Sequence[_Private], goes_on: threading.Event) -> None:
    """Copy within the host, and see that nobody has written to the sources since they were submitted.

    Not before `goes_on`: until the ranks have agreed, the caller waits for whatever takes the processors from them.
    """
    goes_on.wait()
    copy_host([(move.to, move.of) for move in moves])
    changed = [move.name for move in moves if _version(move.of) != move.version]
    if changed:
        raise CheckpointError(
            f"{some(changed, _NAMES_SHOWN, '')} changed while a background save copied them. Change "
            "optimizer state and masters by hand after engine.wait_for_checkpoint(), or by deepspeed.utils.safe_set_full_*."
        )


def _version(tensor: Tensor) -> int:
    """Grows with each write in place; inference tensors count none."""
    return 0 if tensor.is_inference() else tensor._version


class SnapshotMemory:
    """Host memory for one snapshot at a time."""

    def __init__(self, limit_nbytes: float = math.inf) -> None:
        """Store the most it may have."""
        self._limit_nbytes = limit_nbytes
        self._buffer: Tensor | None = None
        self._is_locked = False
        self._placed: list[Piece] = []
        self._making: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        """Size of the buffer."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def prepare(self, pieces: Iterable[Piece]) -> None:
        """Begin to make the memory that `hold` will need for about these pieces; returns at once.

        It gets a little more than they have, for random states and client states that come with them.
        """
        pieces = list(pieces)
        nbytes = needed_nbytes(pieces)
        nbytes += nbytes // _SPARE_SHARE + _SPARE_NBYTES
        if self._making is None and self.nbytes < nbytes <= self._limit_nbytes:
            is_locked = _is_any_on_a_device(pieces)
            self._making = threading.Thread(
                target=self._try_make, args=(nbytes, is_locked), name="deepspeed snapshot memory"
            )
            self._making.start()

    @torch.inference_mode(False)  # threads write to the memory, and the caller's mode is not theirs
    def hold(self, pieces: Sequence[Piece]) -> Snapshot | None:
        """Begin to copy the pieces' data.

        Private pieces must not change until `Snapshot.wait` has returned, others not until `Snapshot.wait_shared` has.
        What an earlier call gave is overwritten. None: they need more than the limit.

        Raises:
            CheckpointError: this host has no room for it.
        """
        nbytes = needed_nbytes(pieces)
        self._finish_making()
        if nbytes > self._limit_nbytes:
            return None
        if nbytes > self.nbytes:
            self._make(int(min(nbytes + _SPARE_NBYTES, self._limit_nbytes)), _is_any_on_a_device(pieces))
        if not self._is_placed(pieces):
            self._placed = [_placed(piece, place) for piece, place in zip(pieces, self._places(pieces), strict=True)]
        return Snapshot(pieces, self._placed)

    def _is_placed(self, pieces: Sequence[Piece]) -> bool:
        """Whether the pieces are those of the last snapshot with other values: then each has its place already."""
        return len(pieces) == len(self._placed) and all(map(_is_alike, pieces, self._placed))

    def release(self) -> None:
        """Give the memory back. Nothing that `hold` returned may be in use."""
        self._finish_making()
        self._release_buffer()

    def _release_buffer(self) -> None:
        if self._buffer is not None and self._is_locked:
            get_accelerator().unregister_host_memory(self._buffer)
        self._buffer, self._is_locked, self._placed = None, False, []

    def _places(self, pieces: Sequence[Piece]) -> Iterator[Tensor]:
        buffer = self._buffer if self._buffer is not None else torch.empty(0, dtype=torch.uint8)  # none is needed then
        start = 0
        for piece in pieces:
            yield buffer[start : start + piece.data.nbytes]
            start += _aligned(piece.data.nbytes)

    def _try_make(self, nbytes: int, is_locked: bool) -> None:
        try:
            self._make(nbytes, is_locked)
        except CheckpointError as error:  # hold tries again, and says so to all ranks
            _logger.debug("memory for snapshots could not be made ahead: %s", error)

    def _make(self, nbytes: int, is_locked: bool) -> None:
        self._release_buffer()
        try:
            buffer = _new_buffer(nbytes)
        except (OSError, MemoryError) as error:
            raise CheckpointError(
                f"a background save needs {nbytes / 1e9:.3g} GB of host memory on this rank for its snapshot, which the "
                f"system refused ({error}). Free memory, or save in the foreground: checkpoint.async_save false."
            ) from error
        self._buffer, self._is_locked = buffer, is_locked and get_accelerator().register_host_memory(buffer)

    def _finish_making(self) -> None:
        if self._making is not None:
            self._making.join()
            self._making = None


def needed_nbytes(pieces: Iterable[Piece]) -> int:
    """Memory that a snapshot of these pieces takes."""
    return sum(_aligned(piece.data.nbytes) for piece in pieces)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES


def _is_any_on_a_device(pieces: Iterable[Piece]) -> bool:
    return any(map(_is_on_a_device, pieces))


def _is_on_a_device(piece: Piece) -> bool:
    return piece.data.device.type != "cpu"


def _new_buffer(nbytes: int) -> Tensor:
    """Memory of our own in which every page is there already, in huge pages where the system has them."""
    memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a forked loader of data would make the next snapshot copy each page
        if hasattr(mmap, advice):
            memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def _is_alike(one: Piece, other: Piece) -> bool:
    """Whether they differ in values alone."""
    of, to = one.data, other.data
    is_same_data = (of.dtype, of.shape) == (to.dtype, to.shape)
    return is_same_data and (one.name, one.shape, one.start, one.cut) == (other.name, other.shape, other.start, other.cut)


def _placed(piece: Piece, place: Tensor) -> Piece:
    """The piece with these bytes as its data."""
    data = piece.data.detach()
    return dataclasses.replace(piece, data=place.view(data.dtype).view(data.shape)) if data.numel() else piece
