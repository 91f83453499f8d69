"""The two ends of a checkpointed segment, where the device is waited for and clocks are read.

    forward     [ wait, start "forward" ] function [ wait, stop, log ]
    backward    outputs' gradients come [ wait, start "backward" ] recomputation, backward [ wait, stop, log ] inputs' leave

Backward is seen by hooks on gradients. Where no input takes one nobody sees its end, so the clock stops with the
recomputation. `synchronize_checkpoint_boundary` waits, `profile` reads clocks (which wait too).

Called by `segment`, once per segment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.timing import SynchronizedWallClockTimer
from deepspeed.common.pytree import map_tensors
from deepspeed.common.pytree import tensors as pytree_tensors
from deepspeed.common.timing import NullTimers, Timers

__all__ = ["Boundary", "NoBoundary", "Watched"]

Tree = TypeVar("Tree")


class Boundary(Protocol):
    """One segment's."""

    def enter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What the segment gets in place of its inputs."""

    def leave(self, output: Tree) -> Tree:
        """What the caller gets in place of its output."""

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """Around the first run of the function."""

    def recomputation(self) -> contextlib.AbstractContextManager[None]:
        """Around each other run."""


class NoBoundary:
    """Nothing is waited for or timed."""

    def enter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `Boundary`."""
        return list(tensors)

    def leave(self, output: Tree) -> Tree:
        """See `Boundary`."""
        return output

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """See `Boundary`."""
        return contextlib.nullcontext()

    def recomputation(self) -> contextlib.AbstractContextManager[None]:
        """See `Boundary`."""
        return contextlib.nullcontext()


class Watched:
    """Both ends wait for the device.

    Args:
        is_timed: log the milliseconds of forward and backward, on rank 0.
    """

    def __init__(self, *, is_timed: bool) -> None:
        self._timers: Timers | NullTimers = SynchronizedWallClockTimer() if is_timed else NullTimers()
        self._sees_end = False

    def enter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `Boundary`."""
        views = [tensor.view_as(tensor) if tensor.requires_grad else tensor for tensor in tensors]
        differentiable = [view for view in views if view.requires_grad]
        self._sees_end = bool(differentiable)
        if differentiable:
            register_multi_grad_hook(differentiable, lambda _: self._end("backward"))
        return views

    def leave(self, output: Tree) -> Tree:
        """See `Boundary`."""
        viewed = map_tensors(lambda tensor: tensor.view_as(tensor) if tensor.requires_grad else tensor, output)
        differentiable = [tensor for tensor in pytree_tensors(viewed) if tensor.requires_grad]
        if differentiable:
            register_multi_grad_hook(differentiable, lambda _: self._begin("backward"), mode="any")
        return viewed

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """See `Boundary`."""
        self._begin("forward")
        try:
            yield
        finally:
            self._end("forward")

    @contextlib.contextmanager
    def recomputation(self) -> Iterator[None]:
        """See `Boundary`."""
        try:
            yield
        finally:
            if not self._sees_end:
                self._end("backward")

    def _begin(self, name: str) -> None:
        get_accelerator().synchronize()
        if not self._timers(name).started:  # a backward pass that did not reach the inputs came before
            self._timers(name).start()

    def _end(self, name: str) -> None:
        get_accelerator().synchronize()
        if self._timers(name).started:
            self._timers(name).stop()
            self._timers.log([name])
