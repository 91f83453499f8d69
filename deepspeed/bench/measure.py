"""Time one collective at one size, on every rank.

Lives here: what is called and how it is timed. Does not live here: what follows from the seconds (`bench.table`).
`bench.command` calls it, on all ranks alike.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_comm

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.bench.table import Measurement

__all__ = ["OPERATIONS", "largest_numel", "measure"]

OPERATIONS = ("all-reduce", "all-gather", "all-to-all", "broadcast", "pt2pt")


def measure(
    operation: str, dtype: torch.dtype, numel: int, *, trials: int, warmups: int, is_async: bool, uses_torch: bool
) -> Measurement:
    """Call `operation` again and again; the same measurement on every rank. Collective over all ranks.

    Args:
        operation: of `OPERATIONS`.
        dtype: of the elements.
        numel: elements of each rank's tensor; a multiple of the number of ranks for all-to-all.
        trials: calls that are timed together.
        warmups: calls before these.
        is_async: start each call asynchronously and wait for it.
        uses_torch: call `torch.distributed` rather than `deepspeed.comm`.
    """
    accelerator = get_accelerator()
    ranks = comm.get_world_size()
    device = accelerator.current_device_name()
    tensor = torch.ones(numel, dtype=dtype, device=device)
    call = _call(torch_comm if uses_torch else comm, operation, tensor, ranks, is_async)
    for _ in range(warmups):
        call()
    accelerator.synchronize()
    comm.barrier()
    began = time.perf_counter()
    for _ in range(trials):
        call()
    accelerator.synchronize()
    slowest = torch.tensor((time.perf_counter() - began) / trials, dtype=torch.float64, device=device)
    comm.all_reduce(slowest, op=comm.ReduceOp.MAX)
    nbytes = tensor.nbytes * (ranks if operation == "all-gather" else 1)
    return Measurement(operation, str(dtype).removeprefix("torch."), nbytes, slowest.item(), ranks)


def _call(library: Any, operation: str, tensor: torch.Tensor, ranks: int, is_async: bool) -> Callable[[], None]:
    if operation == "pt2pt":
        return _message(library, tensor, is_async)
    start: Callable[[], Any]
    if operation == "all-gather":
        whole = torch.empty(ranks * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        gather = getattr(library, "all_gather_single", None) or library.all_gather_into_tensor
        start = functools.partial(gather, whole, tensor, async_op=is_async)
    elif operation == "all-to-all":
        start = functools.partial(library.all_to_all_single, torch.empty_like(tensor), tensor, async_op=is_async)
    elif operation == "broadcast":
        start = functools.partial(library.broadcast, tensor, 0, async_op=is_async)
    else:
        start = functools.partial(library.all_reduce, tensor, async_op=is_async)

    def call() -> None:
        work = start()
        if work is not None:
            work.wait()

    return call


def _message(library: Any, tensor: torch.Tensor, is_async: bool) -> Callable[[], None]:
    """From rank 0 to rank 1; the others wait for nobody."""
    rank = comm.get_rank()
    send, receive = (library.isend, library.irecv) if is_async else (library.send, library.recv)

    def call() -> None:
        work = send(tensor, 1) if rank == 0 else receive(tensor, 0)
        if is_async:
            work.wait()

    return call if rank < 2 else lambda: None


def largest_numel(operation: str, dtype: torch.dtype, memory_factor: float, available_nbytes: int, ranks: int) -> int:
    """Elements of a rank's tensor whose buffers take at most `memory_factor` of the memory that is free."""
    tensors = {"all-gather": 1 + ranks, "all-to-all": 2}.get(operation, 1)
    return int(memory_factor * available_nbytes) // (dtype.itemsize * tensors)
