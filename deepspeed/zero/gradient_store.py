"""What the gradients of a flat group can be asked, wherever they are kept.

    collect --> launch --> wait --> shard, shards --> spend --> close_window        once per boundary, or per backward

Lives here: the protocol. `zero.gradients` has the three stores; `zero.reducer` drives them, `zero.master` reads them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["GradientStore"]


class GradientStore(Protocol):
    """Gradients of one flat group. `number` counts its layout's buckets; a range is one of shard space, in one extent."""

    reduces_every_backward: bool
    """Whether each backward pass is reduced, instead of the last before an update alone."""

    keeps_param_grads: bool
    """Whether `param.grad` shows the gradient between backward passes."""

    spends_with_zeros: bool
    """Whether `spend` is to write zeros over the range, and nothing else: an update may do it as it reads the gradient."""

    @property
    def dtype(self) -> torch.dtype:
        """Of what `shard` gives."""

    def collect(self, number: int) -> Tensor:
        """Bring the gradients of a bucket over from `param.grad`; gives what this rank contributes, padding included."""

    def launch(self, number: int) -> None:
        """Start the mean over ranks of what was collected. All ranks launch the same buckets in one order."""

    def wait(self, number: int) -> None:
        """Block the caller, or its stream, until the launched bucket is reduced. Without a launch: nothing."""

    def shard(self, start: int, stop: int) -> Tensor:
        """The gradient of a range, a view; zero when there was none. After a boundary's reduction."""

    def shards(self) -> list[Tensor]:
        """All of this rank's gradient, as few views: for the norm."""

    def buffers(self) -> list[Tensor]:
        """All memory that the store keeps."""

    def holds(self, number: int) -> bool:
        """Whether the bucket has been given a gradient since the last update, as far as the store can tell."""

    def spend(self, start: int, stop: int) -> None:
        """The range was used by an update."""

    def close_window(self) -> None:
        """Every range was used: the next backward begins anew."""

    def drop(self) -> None:
        """Forget all gradients, those in `param.grad` too."""

    def close(self) -> None:
        """Let go of the buffers."""
