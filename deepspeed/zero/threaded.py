"""The update in two threads: `ratio` and `super_offload`, schedules over the walk of `zero.master`.

    ratio 0.75        thread    | three quarters of the elements |
                      caller    | the rest |  then as below, group by group

    super_offload     thread    | group 0 | group 1      | group 2 |
                      caller              | publish, gather 0 | publish, gather 1 | ...

A flat group is published, and its whole parameters are gathered, as soon as its part of the update is made, while the thread
is at the next one. Elements are stepped with the same kernel and the same factor as in one thread: the numbers are the same.
The update is made after the norm is known. (SuperOffload steps before that and takes back what was wrong; here the norm is
one pass over gradients, less than the copies that a way back would need.)

Where the optimizer has no kernel for one pass (double precision) the caller makes the whole update.

Does not live here: the thread (`common.worker`), the update of one batch (`zero.master`). Built by `engine.training`.

Sources: SuperOffload (arXiv:2509.21271); the split by `ratio` is Twin-Flow of ZeRO-Offload++.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Event
from typing import Any

from torch.optim import Optimizer

from deepspeed.common.worker import Worker, thread_share
from deepspeed.config.zero import OffloadOptimizerConfig
from deepspeed.errors import UnbuiltFeatureError
from deepspeed.ops.optimizer import GroupOptimizer
from deepspeed.zero.flat import FlatGroup
from deepspeed.zero.master import MasterWeights, Slice
from deepspeed.zero.walk import Batch

__all__ = ["StepThread", "ThreadedWeights", "split"]


@dataclass(frozen=True)
class StepThread:
    """What is stepped beside the caller."""

    share: float
    """Part of each rank's elements."""

    threads: int
    """Torch threads of its kernels."""

    @classmethod
    def of(cls, block: OffloadOptimizerConfig | None, *, is_host_apart: bool = False) -> StepThread | None:
        """As `offload_optimizer` says; None where the caller makes the whole update.

        Args:
            block: the config's.
            is_host_apart: whether the device has memory of its own.

        Raises:
            UnbuiltFeatureError: a `ratio` below 1 there: the rest would have to stay on the device.
        """
        if block is None or block.device == "none":
            return None
        if block.ratio < 1.0 and is_host_apart:
            raise UnbuiltFeatureError(
                f"zero_optimization.offload_optimizer.ratio = {block.ratio:g} on an accelerator: keeping a part of the "
                "state on the device is not built yet. Use 1.0, which keeps all of it in host memory."
            )
        if block.super_offload:
            return cls(1.0, thread_share(block.cpuadam_cores_perc))
        return cls(block.ratio, thread_share(block.ratio)) if block.ratio < 1.0 else None


def split(numels: Sequence[int], share: float) -> list[bool]:
    """Which of the slices of `numels` elements the thread steps: as near to `share` of all elements as whole slices allow.

    Spread evenly, so that every flat group is split.
    """
    taken = passed = 0
    is_taken = []
    for numel in numels:
        passed += numel
        takes = passed * share - taken >= numel / 2 and share > 0
        taken += numel if takes else 0
        is_taken.append(takes)
    return is_taken


class ThreadedWeights(MasterWeights):
    """Masters that two threads step at once.

    Args:
        flats: as `MasterWeights`.
        optimizer: as `MasterWeights`.
        thread: what the second thread does.
        **others: as `MasterWeights`; the residence keeps state in memory.
    """

    def __init__(self, flats: Sequence[FlatGroup], optimizer: Optimizer, thread: StepThread, **others: Any) -> None:
        super().__init__(flats, optimizer, **others)
        self._worker = Worker("optimizer step", thread.threads)
        self._behind, self._own = self._shared_out(thread.share)

    def _shared_out(self, share: float) -> tuple[tuple[Batch, ...], tuple[Batch, ...]]:
        """Batches for the thread and for the caller; each of one flat group, unless the residence has laid its own out."""
        groups = len(self.optimizer.param_groups)
        if self.residence.most_numel is not None:
            return self._calls, ()
        is_taken = split([s.numel for s in self.slices], share)
        behind: list[list[Slice]] = []
        own: list[list[Slice]] = []
        for flat in self.flats:
            here = [(s, takes) for s, takes in zip(self.slices, is_taken, strict=True) if s.flat is flat]
            behind.append([s for s, takes in here if takes])
            own.append([s for s, takes in here if not takes])
        return (
            tuple(Batch(slices, groups) for slices in behind if slices),
            tuple(Batch(slices, groups) for slices in own if slices),
        )

    def _step_in_one_pass(self, optimizer: GroupOptimizer, factor: float, *, is_skipped: bool) -> None:
        if is_skipped:
            super()._step_in_one_pass(optimizer, factor, is_skipped=True)
            return
        last = {id(s.flat): number for number, batch in enumerate(self._behind) for s in batch.slices}
        made = [Event() for _ in self._behind]
        works = []
        with ExitStack() as stack:
            open_flats = [stack.enter_context(ExitStack()) for _ in self.flats]
            for flat, opened in zip(self.flats, open_flats, strict=True):
                opened.enter_context(flat.rewriting())
            self._worker.submit(lambda: self._step_behind(optimizer, factor, made))
            for batch in self._own:
                self._step_batch(optimizer, batch, factor)
            for flat, opened in zip(self.flats, open_flats, strict=True):
                if id(flat) in last:
                    made[last[id(flat)]].wait()
                    if self._worker.has_failed:
                        self._worker.join()
                opened.close()
                works += flat.gather_whole()
            self._worker.join()
        for work in works:
            work.wait()
        for flat in self.flats:
            flat.reopen()

    def _step_behind(self, optimizer: GroupOptimizer, factor: float, made: Sequence[Event]) -> None:
        """In the thread: step its batches, and say of each that it is made."""
        try:
            number = -1
            for number, batch in enumerate(self.residence.walk(self._behind)):
                if number:
                    made[number - 1].set()  # the residence has finished a batch when it is asked for the next
                self._step_batch(optimizer, batch, factor)
        finally:
            for event in made:
                event.set()

    def close(self) -> None:
        """End the thread."""
        self._worker.close()
        super().close()
