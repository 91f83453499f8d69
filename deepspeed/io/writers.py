"""Objects with `write` that bytes go through on their way to a file.

    write() fills one half of the buffer ---> the other half is on its way to the disk
                 ^                                        |
                 +--------------- they change roles ------+

Lives here: `FastFileWriter` over the I/O engine, `PyFileWriter` over Python's own file, `MockFileWriter` over nothing. Does
not live here: requests and files (`ops.aio`). Called by scripts and by the commands of `nvme`.
"""

from __future__ import annotations

import abc
import io
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Buffer, Self

from deepspeed.errors import ArgumentError, UsageError
from deepspeed.ops.aio.engine import IoRequest
from deepspeed.ops.aio.handle import AioHandle
from deepspeed.ops.aio.ranges import PAGE_NBYTES

__all__ = ["BaseFileWriter", "FastFileWriter", "FastFileWriterConfig", "MockFileWriter", "PyFileWriter"]


class BaseFileWriter(abc.ABC):
    """One new file, written from its beginning to its end. Leaving the context closes it.

    Attributes:
        nbytes: what `write` was given so far.
    """

    def __init__(self, file_path: str | os.PathLike[str]) -> None:
        self._file_path = os.fspath(file_path)
        self._is_closed = False
        self.nbytes = 0

    def file_path(self) -> str:
        """Return the path as it was given."""
        return self._file_path

    def write(self, buffer: Buffer) -> int:
        """Append all of `buffer`, which may change afterwards; return its bytes.

        Raises:
            UsageError: the writer is closed.
            OSError: the system refuses. It may also do so in a later call, about bytes of this one.
        """
        if self._is_closed:
            raise UsageError(f"write() to {self._file_path} came after close(). Write before, or make another writer.")
        data = memoryview(buffer).cast("B")
        self._append(data)
        self.nbytes += len(data)
        return len(data)

    def save_torch_storage_object_list(self, storage_obj_list: Sequence[object], save_size: bool) -> int:
        """Append the bytes of storages, each after its number of elements (8 bytes, little-endian) if `save_size`.

        Args:
            storage_obj_list: storages or tensors in host memory; of a tensor its whole storage.
            save_size: as torch's format before zip files has it.

        Returns:
            The bytes appended.
        """
        before = self.nbytes
        for one in storage_obj_list:
            data, element_nbytes = _bytes_of(one)
            if save_size:
                self.write(struct.pack("<q", len(data) // element_nbytes))
            self.write(data)
        return self.nbytes - before

    def fileno(self) -> int:
        """Refuse: bytes must come through `write`.

        Raises:
            io.UnsupportedOperation: always; torch goes by it.
        """
        raise io.UnsupportedOperation("fileno")

    @abc.abstractmethod
    def flush(self) -> None:
        """Hand to the system all that was written so far."""

    def close(self) -> None:
        """Write what is left; the bytes are on the disk when this returns. Again: nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abc.abstractmethod
    def _append(self, data: memoryview) -> None: ...

    @abc.abstractmethod
    def _finish(self) -> None: ...


@dataclass
class FastFileWriterConfig:
    """What a `FastFileWriter` works with."""

    dnvme_handle: AioHandle
    """An `aio_handle`; one serves several writers, also at the same time."""

    pinned_tensor: Tensor
    """The buffer: contiguous host memory, best of `new_cpu_locked_tensor`. It is the writer's until `close`."""

    double_buffer: bool = True
    """Fill one half while the other is being written; False: fill the whole, then write it."""

    num_parallel_writers: int = 1
    """Processes that write one file together. Each is given all bytes, and writes every n-th block of them."""

    writer_rank: int = 0
    """Which of them this is."""

    global_rank: int = 0
    """Rank in the job; for the texts of errors."""


class FastFileWriter(BaseFileWriter):
    """Writes past the page cache, from the halves of one buffer that change roles."""

    def __init__(self, file_path: str | os.PathLike[str], config: FastFileWriterConfig) -> None:
        """Open the file.

        Raises:
            ArgumentError: the buffer is shorter than a page per half, or the rank is not one of the writers'.
            FileIoError: the file cannot be made.
        """
        super().__init__(file_path)
        if not 0 <= config.writer_rank < config.num_parallel_writers:
            raise ArgumentError(
                f"writer_rank={config.writer_rank} on rank {config.global_rank}, but with num_parallel_writers="
                f"{config.num_parallel_writers} it is at least 0 and less than that. Number the writers from 0."
            )
        self._config = config
        self._blocks = _blocks_of(config)
        self._requests: list[IoRequest | None] = [None] * len(self._blocks)
        self._engine = config.dnvme_handle.engine
        self._file = self._engine.open(self._file_path, create=True, keep=config.num_parallel_writers > 1)
        self._number = 0  # of the block that is being filled
        self._filled_nbytes = 0

    def flush(self) -> None:
        """Hand all bytes to the system; a block that is not full is written again when it is."""
        self._submit()
        self._wait()

    @property
    def _block_nbytes(self) -> int:
        return self._blocks[0].nbytes

    def _append(self, data: memoryview) -> None:
        while data:
            place = self._number % len(self._blocks)
            block = self._blocks[place].numpy().data
            count = min(len(data), self._block_nbytes - self._filled_nbytes)
            if self._filled_nbytes == 0:
                self._wait_for(place)
            block[self._filled_nbytes : self._filled_nbytes + count] = data[:count]
            self._filled_nbytes += count
            data = data[count:]
            if self._filled_nbytes == self._block_nbytes:
                self._submit()
                self._number, self._filled_nbytes = self._number + 1, 0

    def _submit(self) -> None:
        """Begin to write what is filled of the block, unless that is another writer's."""
        place = self._number % len(self._blocks)
        if self._filled_nbytes and self._number % self._config.num_parallel_writers == self._config.writer_rank:
            self._wait_for(place)
            filled = self._blocks[place][: self._filled_nbytes]
            self._requests[place] = self._engine.write(self._file, self._number * self._block_nbytes, filled)

    def _wait(self) -> None:
        for place in range(len(self._blocks)):
            self._wait_for(place)

    def _wait_for(self, place: int) -> None:
        request, self._requests[place] = self._requests[place], None
        if request is not None:
            request.wait()

    def _finish(self) -> None:
        with self._file:
            self.flush()
            self._file.truncate(self.nbytes)  # a file that was there may have been longer
            self._file.sync()


class PyFileWriter(BaseFileWriter):
    """Writes through Python's file object and the page cache."""

    def __init__(self, file_path: str | os.PathLike[str]) -> None:
        super().__init__(file_path)
        self._file = io.FileIO(self._file_path, "wb")

    def fileno(self) -> int:
        """Return the descriptor: what is written there is in order with what `write` was given."""
        return self._file.fileno()

    def flush(self) -> None:
        """Nothing is held back."""

    def _append(self, data: memoryview) -> None:
        while data:
            data = data[self._file.write(data) :]

    def _finish(self) -> None:
        with self._file:
            os.fsync(self._file.fileno())


class MockFileWriter(BaseFileWriter):
    """Counts bytes and makes no file: what a save costs without a disk."""

    def flush(self) -> None:
        """Nothing is held back."""

    def _append(self, data: memoryview) -> None: ...

    def _finish(self) -> None: ...


def _blocks_of(config: FastFileWriterConfig) -> list[Tensor]:
    count = 2 if config.double_buffer else 1
    buffer = config.pinned_tensor
    if buffer.device.type != "cpu" or not buffer.is_contiguous():
        raise ArgumentError("pinned_tensor is not contiguous host memory. Give one of handle.new_cpu_locked_tensor().")
    whole = buffer.view(-1).view(torch.uint8)
    nbytes = whole.nbytes // count // PAGE_NBYTES * PAGE_NBYTES
    if nbytes == 0:
        raise ArgumentError(
            f"pinned_tensor has {whole.nbytes} bytes, but {count} x {PAGE_NBYTES} are the least that are needed. "
            "Give a longer one; 64 MiB serve well."
        )
    return [whole[number * nbytes : (number + 1) * nbytes] for number in range(count)]


def _bytes_of(storage: object) -> tuple[memoryview, int]:
    """The bytes of a storage, or of a tensor's, and what one element takes."""
    element_nbytes = 1
    if isinstance(storage, Tensor):
        element_nbytes, storage = storage.element_size(), storage.untyped_storage()
    elif isinstance(storage, torch.storage.TypedStorage):  # its public methods warn
        element_nbytes, storage = storage.dtype.itemsize, storage._untyped_storage
    if not isinstance(storage, torch.UntypedStorage) or storage.device.type != "cpu":
        raise ArgumentError(f"{type(storage).__name__} was given, but storages in host memory are written. Move it there.")
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data, element_nbytes
