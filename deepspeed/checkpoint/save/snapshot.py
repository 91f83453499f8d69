"""A copy of what a rank writes, in host memory, so that training goes on while it is written.

    pieces on any device --- one pass ---> | piece | piece | ... |  one flat buffer, filled again by each snapshot

The buffer is kept from one save to the next: fresh memory costs several times the copy, because the system clears each page
of it. So the first one is made ready ahead, in a thread (`prepare`), and later ones allocate nothing. Where an accelerator
holds the state, the buffer is locked into memory and the copies run beside each other.

The copy runs in a thread, outside the interpreter's lock, while the ranks agree on what they are about to write.

Does not live here: when to take one (`background`). One object per rank; its methods are called by one thread.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.save.piece import Piece
from deepspeed.common.deferred import DeferredTensor, loaded
from deepspeed.common.logging import get_logger
from deepspeed.errors import CheckpointError
from deepspeed.ops.host_copy import copy_host

__all__ = ["Snapshot", "SnapshotMemory", "needed_nbytes"]

_ALIGNMENT_NBYTES = 64
_SPARE_NBYTES = 1 << 20
_SPARE_SHARE = 64

_logger = get_logger(__name__)


class Snapshot:
    """Pieces that are being copied to places of their own.

    Args:
        pieces: what is copied.
        places: the same pieces with the memory that it goes to.
    """

    def __init__(self, pieces: Sequence[Piece], places: list[Piece]) -> None:
        self._places = places
        pairs = [(loaded(to.data), of.data.detach()) for to, of in zip(places, pieces, strict=True) if of.data.numel()]
        for to, of in pairs:
            if isinstance(of, Tensor) and of.device.type != "cpu":
                to.copy_(of, non_blocking=True)
        self._is_any_on_a_device = _is_any_on_a_device(pieces)
        on_host = [(to, of) for to, of in pairs if of.device.type == "cpu"]
        thread = ThreadPoolExecutor(1, "deepspeed snapshot")
        self._copying = thread.submit(_copy, on_host)
        thread.shutdown(wait=False)

    def pieces(self) -> list[Piece]:
        """The pieces with data of their own; blocks until the copy is complete."""
        self._copying.result()
        if self._is_any_on_a_device:
            get_accelerator().synchronize()
        return self._places


def _copy(pairs: Sequence[tuple[Tensor, Tensor | DeferredTensor]]) -> None:
    """Copy within the host; what is deferred is read, one tensor at a time."""
    copy_host([(to, of) for to, of in pairs if isinstance(of, Tensor)])
    for to, of in pairs:
        if isinstance(of, DeferredTensor):
            to.copy_(of.read())


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

    def hold(self, pieces: Sequence[Piece]) -> Snapshot | None:
        """Begin to copy the pieces' data, which must not change until `Snapshot.pieces` has returned.

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
    return any(piece.data.device.type != "cpu" for piece in pieces)


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
