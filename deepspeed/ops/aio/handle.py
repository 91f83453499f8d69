"""`aio_handle`: the documented object that moves tensors to and from files.

    handle = AsyncIOBuilder().load().aio_handle(intra_op_parallelism=4)
    handle.async_pwrite(tensor, "/local_nvme/tensor.bin")       goes on beside the computation
    handle.wait()                                               until all of them are done

Lives here: names, argument order and return values of the documented interface. Does not live here: the work (`engine`).
Called by scripts; the package itself uses the engine.

Kept from the published interface: whole tensors to whole files by name, results as numbers of transfers. Not kept: errors
as negative numbers, or the end of the process; here they are `FileIoError`.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from typing_extensions import Self

from deepspeed.errors import ArgumentError, FileIoError
from deepspeed.ops.aio.engine import IoEngine, IoFile, IoRequest, IoSettings, aligned_empty
from deepspeed.ops.aio.ranges import PAGE_NBYTES
from deepspeed.ops.host_copy import copy_host

__all__ = ["AioHandle", "FileName", "aio_read", "aio_write", "deepspeed_memcpy"]


FileName: TypeAlias = str | Path | int
"""A path, or the descriptor of an open file."""


class _Pending(NamedTuple):
    """A transfer that `wait` will finish."""

    request: IoRequest
    file: IoFile
    offset: int
    host: Tensor
    """The bytes that are moved."""

    into: Tensor
    """Where they are wanted in the end: the same, or a tensor on a device."""

    validate: bool

    def finish(self) -> None:
        try:
            self.request.wait()
        except FileIoError:
            self.file.close()
            raise
        with self.file:
            if self.into is not self.host:
                self.into.copy_(self.host)
            if self.validate:
                _compare(self.host, self.file, self.offset)


class AioHandle:
    """Moves contiguous tensors to and from files, `queue_depth` blocks of `block_size` bytes in flight per thread.

    Tensors on a device go through page-locked host memory. Any thread may use a handle, but `wait` waits for all.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        """Start threads for it. The arguments are those of the `aio` block.

        Raises:
            ArgumentError: a number is not a whole one of at least 1.
        """
        self._settings = IoSettings(
            block_nbytes=block_size,
            queue_depth=queue_depth,
            threads=intra_op_parallelism,
            single_submit=single_submit,
            overlap_events=overlap_events,
        )
        self._engine = IoEngine(self._settings)
        self._pending: list[_Pending] = []
        self._locked: dict[int, Tensor] = {}

    @property
    def engine(self) -> IoEngine:
        """What does the work, for callers that want one request at a time to wait for."""
        return self._engine

    # ---------------------------------------------------------------- settings

    def get_block_size(self) -> int:
        """Return the bytes per block."""
        return self._settings.block_nbytes

    def get_queue_depth(self) -> int:
        """Return the blocks in flight per thread."""
        return self._settings.queue_depth

    def get_single_submit(self) -> bool:
        """Return whether blocks are handed over one by one."""
        return self._settings.single_submit

    def get_overlap_events(self) -> bool:
        """Return whether the queue is filled up as soon as one block is done."""
        return self._settings.overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Return the threads."""
        return self._settings.threads

    def get_alignment(self) -> int:
        """Return the alignment of offsets and lengths, in bytes, that makes a transfer fast; any other works."""
        return PAGE_NBYTES

    # ---------------------------------------------------------------- transfers

    def read(self, buffer: Tensor, filename: FileName, validate: bool = False, file_offset: int = 0) -> int:
        """Fill `buffer` from the file; `sync_pread` with a check."""
        return self.pread(buffer, filename, validate, False, file_offset)

    def write(self, buffer: Tensor, filename: FileName, validate: bool = False, file_offset: int = 0) -> int:
        """Write `buffer` to the file; `sync_pwrite` with a check."""
        return self.pwrite(buffer, filename, validate, False, file_offset)

    def sync_pread(self, buffer: Tensor, filename: FileName, file_offset: int = 0) -> int:
        """Fill `buffer` from the file and return 1 when that is done."""
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: Tensor, filename: FileName, file_offset: int = 0) -> int:
        """Write `buffer` to the file and return 1 when that is done."""
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: Tensor, filename: FileName, file_offset: int = 0) -> int:
        """Begin to fill `buffer`, whose contents are undefined until `wait`; return 0."""
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(self, buffer: Tensor, filename: FileName, file_offset: int = 0) -> int:
        """Begin to write `buffer`, which must not change until `wait`; return 0."""
        return self.pwrite(buffer, filename, False, True, file_offset)

    def pread(
        self,
        buffer: Tensor,
        filename: FileName,
        validate: bool = False,
        is_async: bool = False,
        file_offset: int = 0,
    ) -> int:
        """Fill a tensor from a file.

        Args:
            buffer: contiguous; any dtype and device.
            filename: a file of at least `file_offset` and the tensor's bytes; a number is a descriptor of an open file.
            validate: read the bytes again by plain calls and compare.
            is_async: return at once; `wait` finishes it.
            file_offset: where in the file the tensor begins, bytes.

        Returns:
            What `wait` would return for it: 1; 0 when `is_async`.

        Raises:
            FileIoError: the file cannot be read, or ends before.
        """
        nbytes = _nbytes(buffer, file_offset)
        file = self._engine.open(_path_of(filename), file_offset + nbytes)
        host = self._host_side(buffer)
        request = self._engine.read(file, file_offset, host)
        return self._begin(_Pending(request, file, file_offset, host, buffer, validate), is_async)

    def pwrite(
        self,
        buffer: Tensor,
        filename: FileName,
        validate: bool = False,
        is_async: bool = False,
        file_offset: int = 0,
    ) -> int:
        """Write a tensor to a file, which is made where it is not there and keeps its other bytes where it is.

        Args:
            buffer: contiguous; any dtype and device.
            filename: in a folder that exists; a number is a descriptor of an open file.
            validate: read the bytes back by plain calls and compare.
            is_async: return at once; `wait` finishes it.
            file_offset: where in the file the tensor begins, bytes.

        Returns:
            What `wait` would return for it: 1; 0 when `is_async`.

        Raises:
            FileIoError: the file cannot be written, or there is no space.
        """
        _nbytes(buffer, file_offset)
        file = self._engine.open(_path_of(filename), create=True, keep=True)
        host = self._host_side(buffer)
        if host is not buffer:
            host.copy_(buffer)
        request = self._engine.write(file, file_offset, host)
        return self._begin(_Pending(request, file, file_offset, host, host, validate), is_async)

    def wait(self) -> int:
        """Wait for all transfers that were begun with `async_*`; return how many.

        Raises:
            FileIoError: one of them failed; the others are done.
        """
        count, failures = 0, []
        while self._pending:  # each leaves the list when it is over: Ctrl-C in between loses none
            try:
                self._pending[0].finish()
            except FileIoError as error:
                failures.append(error)
            del self._pending[0]
            count += 1
        if failures:
            raise failures[0]
        return count

    # ---------------------------------------------------------------- memory

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """Return `num_elem` elements of host memory that transfers need not copy: aligned, and locked for the device.

        Args:
            num_elem: at least 0.
            example_tensor: gives the dtype.
        """
        tensor = aligned_empty(num_elem * example_tensor.element_size(), is_pinned=True).view(example_tensor.dtype)
        self._locked[tensor.data_ptr()] = tensor
        return tensor

    def is_pinned(self, buffer: Tensor) -> bool:
        """Return whether transfers need not copy these bytes: memory of `new_cpu_locked_tensor`, or page-locked by torch."""
        address = buffer.data_ptr()
        return buffer.is_pinned() or any(
            begin <= address and address + buffer.nbytes <= begin + whole.nbytes for begin, whole in self._locked.items()
        )

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        """Let go of such a tensor, whose memory goes with the caller's last reference; False: it is not of this handle."""
        return self._locked.pop(tensor.data_ptr(), None) is not None

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """Wait for everything and end the threads; this happens by itself when the handle is dropped."""
        try:
            self.wait()
        finally:
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _host_side(self, buffer: Tensor) -> Tensor:
        """The tensor itself, or host memory of its shape for one on a device."""
        if buffer.device.type == "cpu":
            return buffer
        return aligned_empty(buffer.nbytes, is_pinned=True).view(buffer.dtype).view(buffer.shape)

    def _begin(self, pending: _Pending, is_async: bool) -> int:
        if is_async:
            self._pending.append(pending)
            return 0
        pending.finish()
        return 1


def aio_read(
    buffer: Tensor,
    filename: FileName,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Fill one tensor from a file, with a handle for this call alone; return 1. See `AioHandle.read`."""
    with AioHandle(block_size, queue_depth, single_submit, overlap_events) as handle:
        return handle.read(buffer, filename, validate)


def aio_write(
    buffer: Tensor,
    filename: FileName,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Write one tensor to a file, with a handle for this call alone; return 1. See `AioHandle.write`."""
    with AioHandle(block_size, queue_depth, single_submit, overlap_events) as handle:
        return handle.write(buffer, filename, validate)


def deepspeed_memcpy(dest: Tensor, src: Tensor) -> int:
    """Copy `src` to `dest`, both in host memory and of the same shape and dtype, around the cache; return 1."""
    if dest.shape != src.shape or dest.dtype != src.dtype:
        raise ArgumentError(
            f"dest is {tuple(dest.shape)} {dest.dtype}, src is {tuple(src.shape)} {src.dtype}. Give tensors that are alike."
        )
    copy_host([(dest, src)])
    return 1


def _path_of(filename: FileName) -> str | Path:
    """A path that opens the file; of a descriptor, the system's name for it."""
    return f"/proc/self/fd/{filename}" if isinstance(filename, int) else filename


def _nbytes(buffer: Tensor, file_offset: int) -> int:
    if not isinstance(file_offset, int) or file_offset < 0:
        raise ArgumentError(f"file_offset={file_offset!r}, but it is a whole number of bytes, at least 0. Give one.")
    if not buffer.is_contiguous():
        raise ArgumentError(
            f"a tensor of shape {tuple(buffer.shape)} and strides {buffer.stride()} was given, but only contiguous ones are "
            "read and written. Give tensor.contiguous()."
        )
    return buffer.nbytes


def _compare(host: Tensor, file: IoFile, offset: int) -> None:
    """Hold the bytes of a tensor against those of the file, read by plain calls."""
    found = torch.empty(host.nbytes, dtype=torch.uint8)
    with file.path.open("rb") as plain:
        plain.seek(offset)
        count = plain.readinto(found.numpy().data)
    given = host.reshape(-1).view(torch.uint8)
    if not torch.equal(found[:count], given):
        different = torch.nonzero(found[:count] != given[:count])
        at = int(different[0]) if len(different) else count
        raise FileIoError(
            errno.EIO,
            f"{file.path} differs from the tensor that was moved, first at byte {offset + at} of the file. "
            "Somebody else writes to it, or the disk is damaged: look into the kernel's log.",
        )
