"""What is measured: one tensor to one file or back, again and again, by one of several ways.

    engine          write                                          read
    aio_handle      a handle that is kept                          the same
    aio_basic       a handle for each transfer                     the same
    torch_io        torch.save                                     torch.load
    torch_fastio    torch.save into a FastFileWriter               torch.load

Called by the commands of this room, in one or several processes. Does not live here: tables, pictures, processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, NamedTuple, cast

import psutil
import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ArgumentError
from deepspeed.io import FastFileWriter, FastFileWriterConfig
from deepspeed.ops.aio.engine import aligned_empty
from deepspeed.ops.aio.handle import AioHandle, aio_read, aio_write

__all__ = ["ENGINES", "Engine", "Loop", "Memory", "Workload", "make_tensor", "measure"]

Engine = Literal["aio_handle", "aio_basic", "torch_io", "torch_fastio"]
ENGINES: tuple[Engine, ...] = ("aio_handle", "aio_basic", "torch_io", "torch_fastio")

Memory = Literal["aligned", "plain", "pinned", "device"]
"""Where the tensor lies: host memory that begins at a page, as torch gives it, or page-locked by torch; or on the
device."""


@dataclass(frozen=True)
class Workload:
    """One measurement; the defaults are those of `ds_io`."""

    nbytes: int
    is_read: bool = False
    engine: Engine = "aio_handle"
    memory: Memory = "aligned"
    block_nbytes: int = 1 << 20
    queue_depth: int = 32
    single_submit: bool = False
    overlap_events: bool = True
    threads: int = 1
    loops: int = 3
    warmup_loops: int = 1
    validate: bool = False
    buffer_nbytes: int = 64 << 20
    """Buffer of the fast writer."""
    is_zip: bool = True
    """Format of torch.save: zip file, or the one before."""
    is_file_per_loop: bool = False

    @property
    def file_count(self) -> int:
        """How many files it leaves."""
        return self.loops + self.warmup_loops if self.is_file_per_loop else 1


class Loop(NamedTuple):
    """One transfer."""

    seconds: float
    cpu_seconds: float
    """Processor time of this process meanwhile, all threads."""
    is_warmup: bool


def measure(workload: Workload, folder: Path, meet: Callable[[], object]) -> list[Loop]:
    """Carry out the loops with files in `folder`.

    Args:
        workload: what.
        folder: for its files, which are left there.
        meet: called before each loop, so that several processes begin it together.

    Raises:
        ArgumentError: there is not the memory for the tensor.
        FileIoError: the disk fails, or a validation does.
    """
    with _handle(workload) as handle:
        tensor = make_tensor(workload)
        transfer = _transfer(workload, handle)
        count = workload.warmup_loops + workload.loops
        paths = [folder / f"file-{number if workload.is_file_per_loop else 0}" for number in range(count)]
        if workload.is_read:
            for path in dict.fromkeys(paths):
                _prepare(workload, handle, tensor, path)
        loops = []
        for number, path in enumerate(paths):
            if workload.is_read:
                _drop_from_cache(path)
            meet()
            loops.append(Loop(*_timed(transfer, tensor, path), is_warmup=number < workload.warmup_loops))
        return loops


def _timed(transfer: Callable[[Tensor, Path], object], tensor: Tensor, path: Path) -> tuple[float, float]:
    cpu, began = time.process_time(), time.perf_counter()
    transfer(tensor, path)
    get_accelerator().synchronize()
    return time.perf_counter() - began, time.process_time() - cpu


@contextmanager
def _handle(workload: Workload) -> Iterator[AioHandle]:
    with AioHandle(
        workload.block_nbytes,
        workload.queue_depth,
        workload.single_submit,
        workload.overlap_events,
        workload.threads,
    ) as handle:
        yield handle


def make_tensor(workload: Workload) -> Tensor:
    """Return a uint8 tensor of noise, which repeats, where the workload wants it; no disk can compress it away.

    Raises:
        ArgumentError: there is not the memory.
    """
    free_nbytes = psutil.virtual_memory().available
    if workload.nbytes > free_nbytes:
        raise ArgumentError(
            f"a tensor of {workload.nbytes} bytes was asked for, and {free_nbytes} bytes of memory are free. "
            "Give a smaller --io_size."
        )
    noise = torch.randint(0, 256, (min(workload.nbytes, 1 << 20),), dtype=torch.uint8)
    tensor = _empty(workload)
    tensor.copy_(noise.repeat(-(-workload.nbytes // noise.numel()))[: workload.nbytes])
    return tensor


def _empty(workload: Workload) -> Tensor:
    if workload.memory == "aligned":
        return aligned_empty(workload.nbytes, is_pinned=True)
    if workload.memory == "pinned":
        return get_accelerator().pin_empty(workload.nbytes, dtype=torch.uint8)
    device = get_accelerator().current_device_name() if workload.memory == "device" else "cpu"
    return torch.empty(workload.nbytes, dtype=torch.uint8, device=device)


def _prepare(workload: Workload, handle: AioHandle, tensor: Tensor, path: Path) -> None:
    if workload.engine in ("torch_io", "torch_fastio"):
        torch.save(tensor, path, _use_new_zipfile_serialization=workload.is_zip)
    else:
        handle.sync_pwrite(tensor, path)


def _drop_from_cache(path: Path) -> None:
    """Let the next read come from the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _transfer(workload: Workload, handle: AioHandle) -> Callable[[Tensor, Path], object]:
    """What one loop does."""
    if workload.engine in ("torch_io", "torch_fastio"):
        if workload.is_read:
            return _load_checked if workload.validate else _load
        return _saver(workload, handle)
    if workload.engine == "aio_handle":
        move = handle.read if workload.is_read else handle.write
        return lambda tensor, path: move(tensor, path, workload.validate)
    basic = aio_read if workload.is_read else aio_write
    return lambda tensor, path: basic(
        tensor,
        path,
        workload.block_nbytes,
        workload.queue_depth,
        workload.single_submit,
        workload.overlap_events,
        workload.validate,
    )


def _load(tensor: Tensor, path: Path) -> Tensor:
    found: Tensor = torch.load(path, map_location=tensor.device, weights_only=True)
    return found


def _load_checked(tensor: Tensor, path: Path) -> None:
    if not torch.equal(_load(tensor, path), tensor):
        raise ArgumentError(f"{path} holds other bytes than were saved. Look into the kernel's log.")


def _saver(workload: Workload, handle: AioHandle) -> Callable[[Tensor, Path], None]:
    buffer = handle.new_cpu_locked_tensor(workload.buffer_nbytes, torch.empty(0, dtype=torch.uint8))

    def save(tensor: Tensor, path: Path) -> None:
        if workload.engine == "torch_fastio":
            with FastFileWriter(path, FastFileWriterConfig(handle, buffer)) as file:
                torch.save(tensor, cast(IO[bytes], file), _use_new_zipfile_serialization=workload.is_zip)
        else:
            with path.open("wb") as plain:
                torch.save(tensor, plain, _use_new_zipfile_serialization=workload.is_zip)
                plain.flush()
                os.fsync(plain.fileno())
        if workload.validate:
            _load_checked(tensor, path)

    return save
