"""What the steps of a real engine take, by tier, as the allocators of the process tell it.

    device   tensors at rest (`tensor_bytes`), and in one step every allocation and release of torch's CPU allocator, as
             `torch.profiler` records them: temporaries inside of kernels and of autograd are among them
    host     what `ops.aio.memory.aligned_empty` has mapped and a tensor still uses: that is how an engine takes host memory
             that is apart from its device's (`offload.placement`, which the caller tells so); and tensors that the caller
             knows to be made beside it, as an optimizer makes its state beside masters
    nvme     bytes of the files in a folder, as the file system has them

Nothing here knows what an engine should take. What is not seen is memory that a library takes from the system by itself.

The profiler is not told of storages that were there before it was switched on: a step's peak is what is at rest before it
and the most that came during it. A step that let go of what was at rest would be counted too high; an engine's does not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.support.tensor_bytes import bytes_of_tensors, mapped_bytes_of_tensors, place_of

__all__ = ["Measured", "measure_step", "most_allocated"]


@dataclass(frozen=True)
class Measured:
    """Of one rank, in bytes."""

    rest: int
    """Device memory between two steps that no other rank maps."""

    shared: dict[str, int]
    """Memory that ranks map together, by place."""

    over_rest: int
    """The most that one step took besides."""

    host: int
    nvme: int

    @staticmethod
    def device_at_rest(ranks: list[Measured]) -> float:
        """Of the worst rank; what ranks map together counts once for all of them."""
        return max(rank.rest for rank in ranks) + Measured._share(ranks)

    @staticmethod
    def device_peak(ranks: list[Measured]) -> float:
        """The same at the busiest moment."""
        return max(rank.rest + rank.over_rest for rank in ranks) + Measured._share(ranks)

    @staticmethod
    def _share(ranks: list[Measured]) -> float:
        return sum({place: nbytes for rank in ranks for place, nbytes in rank.shared.items()}.values()) / len(ranks)


def most_allocated(step: Callable[[], None]) -> int:
    """Run `step`; the most bytes that torch's CPU allocator gave out during it and had not got back."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    kineto = profiled.profiler.kineto_results  # type: ignore[union-attr]
    changes = [(each.start_ns(), each.nbytes()) for each in kineto.events() if each.name() == "[memory]"]
    living = most = 0
    for _, nbytes in sorted(changes, key=lambda change: change[0]):
        living += nbytes
        most = max(most, living)
    return most


def measure_step(
    before: dict[str, int], step: Callable[[], None], folder: Path, ranks: int, on_host: Iterable[Tensor] = ()
) -> Measured:
    """Measure an engine that has made its first steps.

    Args:
        before: `bytes_of_tensors()` before there was anything of it.
        step: one more of its steps, from the making of a batch to the update.
        folder: where its files are, and those of the other ranks.
        ranks: of the run.
        on_host: tensors of torch's allocator that would be in host memory.
    """
    gc.collect()
    mapped = mapped_bytes_of_tensors() | {place_of(each): each.untyped_storage().nbytes() for each in on_host}
    rest = {p: nbytes for p, nbytes in bytes_of_tensors().items() if p not in before and p not in mapped}
    shared = {place: nbytes for place, nbytes in rest.items() if place.startswith("file")}
    files = [each for each in folder.rglob("*") if each.is_file()]
    over_rest = most_allocated(step)
    return Measured(
        sum(rest.values()) - sum(shared.values()),
        shared,
        over_rest,
        sum(nbytes for place, nbytes in mapped.items() if place not in before),
        sum(each.stat().st_size for each in files) // ranks,
    )
