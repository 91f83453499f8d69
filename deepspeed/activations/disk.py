"""Saved inputs in a file on a fast disk: `offload.device: "nvme"`.

    tensor --lane--> staging --write--> file --read--> memory (--lane--> device)

                  copied             written             bring              value
     COPYING -------------> WRITING ---------> ON_DISK -------> READING ----------> ON_DISK

While it is on its way out its value is still in the staging buffer, and is taken from there when backward wants it
already. On a CPU the memory that was read into is the tensor itself. The file is as long as what rested in it at once
(`file_space`); it lies in a folder of this process's own, which goes with it.

[Note: abandoned writes] A graph may be dropped while its inputs are being written. The range is free for others only when
that write is over, so the place keeps such writes until then; an error of one is raised by the next `put`, for a disk
that fails is to be known.

Does not live here: reading and writing (`ops.aio.engine`), which inputs, and when (`keeping`, the caller).
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from deepspeed.activations.buffers import Buffers
from deepspeed.activations.file_space import FileSpace
from deepspeed.activations.lane import Arrival, Lane
from deepspeed.offload import placement
from deepspeed.offload.sub_groups import aligned
from deepspeed.offload.swap_folder import SwapFolder
from deepspeed.ops.aio.engine import IoEngine, IoRequest, aligned_empty

__all__ = ["DiskPlace"]


class DiskState(Enum):
    """Where the value is; the module's picture shows the ways."""

    COPYING = "copying"
    WRITING = "writing"
    ON_DISK = "on disk"
    READING = "reading"


class _Abandoned(NamedTuple):
    """A write that nobody waits for any more."""

    write: IoRequest
    begin: int
    memory: Tensor


class DiskPlace:
    """One process's file.

    Args:
        io: moves bytes; closed with the place.
        nvme_path: the folder is made in it.
        staging: host buffers, page-locked where the device is apart.
        lane: carries values of devices to the host and back.

    Raises:
        FileIoError: no file can be made there.
    """

    def __init__(self, io: IoEngine, nvme_path: Path, staging: Buffers, lane: Lane) -> None:
        self.io = io
        self.staging = staging
        self.lane = lane
        self.space = FileSpace()
        self._folder = SwapFolder.claim(nvme_path, "activations")
        self.file = io.open(self._folder.path / "activations", create=True)
        self._abandoned: list[_Abandoned] = []

    def accepts(self, tensor: Tensor, *, is_cut: bool) -> bool:
        """Anything."""
        return True

    def put(self, flat: Tensor) -> _OnDisk:
        """See `Place`.

        Raises:
            FileIoError: an earlier value could not be written.
        """
        self._end_abandoned()
        return _OnDisk(self, flat)

    def abandon(self, write: IoRequest, begin: int, memory: Tensor) -> None:
        """See [Note: abandoned writes]."""
        self._abandoned.append(_Abandoned(write, begin, memory))

    def free(self, begin: int, memory: Tensor | None, nbytes: int) -> None:
        """A range, and the staging buffer of its value, are not used any more."""
        self.space.give_back(begin, nbytes)
        if memory is not None:
            self.staging.give_back(memory)

    def _end_abandoned(self) -> None:
        over = [each for each in self._abandoned if each.write.is_done]
        self._abandoned = [each for each in self._abandoned if not each.write.is_done]
        for each in over:
            self.free(each.begin, each.memory, each.memory.numel())
        for each in over:
            each.write.wait()


class _OnDisk:
    def __init__(self, place: DiskPlace, flat: Tensor) -> None:
        self._place = place
        self._device, self._dtype, self._nbytes = flat.device, flat.dtype, flat.nbytes
        self._is_apart = placement.is_host_apart(flat.device)
        self._file_nbytes = aligned(flat.nbytes)
        self._begin = place.space.take(self._file_nbytes)
        self._staging: Tensor | None = place.staging.take(self._file_nbytes)  # whole pages, so that they go directly
        self._request: IoRequest | None = None
        self._coming: Tensor | None = None
        self._copied: Any = place.lane.out(self._values_in(self._staging), flat)
        self.state = DiskState.COPYING
        self.advance()

    def advance(self) -> None:
        """See `Rest`.

        Raises:
            FileIoError: it could not be written.
        """
        if self.state is DiskState.COPYING and self._copied.query():
            self._write()
        if self.state is DiskState.WRITING:
            assert self._request is not None  # WRITING has one
            if self._request.is_done:
                self._end_write()

    def settle(self) -> None:
        """See `Rest`.

        Raises:
            FileIoError: it could not be written.
        """
        if self.state is DiskState.COPYING:
            self._copied.synchronize()
            self._write()
        if self.state is DiskState.WRITING:
            self._end_write()

    def bring(self) -> None:
        """See `Rest`."""
        if self.state is DiskState.ON_DISK:
            take = self._place.staging.take if self._is_apart else aligned_empty
            self._coming = take(self._file_nbytes)
            self._request = self._place.io.read(self._place.file, self._begin, self._coming)
            self.state = DiskState.READING

    def value(self) -> Tensor:
        """See `Rest`.

        Raises:
            FileIoError: it could not be written, or read.
        """
        self.advance()
        if self._staging is not None:
            return self._copied_back(self._staging)
        self.bring()
        assert self._coming is not None  # READING has them
        assert self._request is not None
        self._request.wait()
        memory = self._coming
        self._coming = self._request = None
        self.state = DiskState.ON_DISK
        if not self._is_apart:
            return self._values_in(memory)
        values = self._copied_back(memory)
        self._place.staging.give_back(memory)
        return values

    def _copied_back(self, memory: Tensor) -> Tensor:
        """The values of a host buffer, which may be read into after the call: that is no work of the lane."""
        arrival: Arrival = self._place.lane.back(self._values_in(memory), self._device)
        arrival.event.synchronize()
        return arrival.wait()

    def _values_in(self, memory: Tensor) -> Tensor:
        return memory[: self._nbytes].view(self._dtype)

    def _write(self) -> None:
        assert self._staging is not None  # until the write is over
        self._request = self._place.io.write(self._place.file, self._begin, self._staging)
        self.state = DiskState.WRITING

    def _end_write(self) -> None:
        assert self._request is not None  # WRITING has one
        self._request.wait()
        assert self._staging is not None
        self._place.staging.give_back(self._staging)
        self._staging = self._request = None
        self.state = DiskState.ON_DISK

    def __del__(self) -> None:
        state = getattr(self, "state", None)  # None: there was no memory for it
        if state is DiskState.WRITING and self._request is not None and self._staging is not None:
            self._place.abandon(self._request, self._begin, self._staging)
        elif state is not None:
            if state is DiskState.COPYING:
                self._copied.synchronize()  # before others write or read the buffer
            self._place.free(self._begin, self._staging, self._file_nbytes)
