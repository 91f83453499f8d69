"""Where masters and optimizer state rest between updates: the seam, and the forms where they are in memory all the time.

    walk             for batch in residence.walk(batches): masters and state of the batch are at hand
    between walks    ranges of state are read, edited and put away; masters have their own access (`zero.masters`)

The walk (`zero.master`) does not know which form it has, and neither does what looks at state from outside (`zero.state_io`,
`zero.access`). Forms here: `InMemory`, and `OnHost` for an accelerator's host, from which rounded values are delivered to
the device while the next batch is stepped. `zero.disk_residence` is the other form; `engine.tiers` chooses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from deepspeed.common.deferred import DeferredTensor
from deepspeed.zero.delivery import Delivery
from deepspeed.zero.walk import Batch, Slice

__all__ = ["InMemory", "OnHost", "Residence"]

_HOST_BATCH_NUMEL = 1 << 24  # long enough to hide what starts a copy, short enough that staging is small


class Residence(Protocol):
    """Brings masters and state of the batches of one walk to hand."""

    @property
    def most_numel(self) -> int | None:
        """Most elements of a batch, and of a slice; None: the walk's own choice."""

    @property
    def is_in_memory(self) -> bool:
        """Whether all state is, so that all of it may be looked at at once."""

    def attach(self, batches: Sequence[Batch], optimizer: Optimizer) -> None:
        """Take over the slices, of which the optimizer has no state yet. Once. Collective over the shard axis."""

    def walk(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Give each batch while what belongs to it is at hand; in any order that suits. `batches` are those of `attach`.

        Raises:
            FileIoError: on this rank alone; see `agreeing`.
        """

    def agreeing(self) -> AbstractContextManager[None]:
        """Whatever may touch a tier goes inside: what one rank meets there, all ranks raise. Collective at its end."""

    def read_state(self, s: Slice, key: str, start: int, stop: int) -> Tensor | DeferredTensor:
        """Elements `[start, stop)` of a state tensor of the slice, 1-D: a view, or what reads them."""

    def editing_state(self, s: Slice, key: str, start: int, stop: int) -> AbstractContextManager[Tensor]:
        """Change them inside."""

    def put_away(self, s: Slice, state: dict[str, Any]) -> dict[str, Tensor]:
        """Take new state tensors of a slice out of `state`, to where they rest; gives what stands in their place."""

    def renewing(self) -> AbstractContextManager[None]:
        """All state is put away anew inside, masters were before: what a failed update has left is gone. Collective."""

    def close(self) -> None:
        """Let go of everything. Not collective."""


class InMemory:
    """State is where the optimizer has made it."""

    most_numel: int | None = None
    is_in_memory = True

    def __init__(self) -> None:
        self._optimizer: Optimizer | None = None

    def attach(self, batches: Sequence[Batch], optimizer: Optimizer) -> None:
        """See `Residence`."""
        self._optimizer = optimizer

    def walk(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """See `Residence`."""
        return iter(batches)

    def agreeing(self) -> AbstractContextManager[None]:
        """See `Residence`: there is nothing that could be met."""
        return nullcontext()

    def read_state(self, s: Slice, key: str, start: int, stop: int) -> Tensor:
        """See `Residence`."""
        assert self._optimizer is not None  # attached by whoever made the slice
        value: Tensor = self._optimizer.state[s.param][key]
        return value.detach().reshape(-1)[start:stop]

    @contextmanager
    def editing_state(self, s: Slice, key: str, start: int, stop: int) -> Iterator[Tensor]:
        """See `Residence`."""
        yield self.read_state(s, key, start, stop)

    def put_away(self, s: Slice, state: dict[str, Any]) -> dict[str, Tensor]:
        """See `Residence`: it may stay."""
        return {}

    def renewing(self) -> AbstractContextManager[None]:
        """See `Residence`."""
        return nullcontext()

    def close(self) -> None:
        """See `Residence`."""


class OnHost(InMemory):
    """Masters and state are in host memory, the model's values are not.

    Args:
        is_pinned: lock the memory through which values are delivered.
    """

    most_numel = _HOST_BATCH_NUMEL

    def __init__(self, *, is_pinned: bool) -> None:
        super().__init__()
        self._is_pinned = is_pinned

    def attach(self, batches: Sequence[Batch], optimizer: Optimizer) -> None:
        """See `Residence`."""
        super().attach(batches, optimizer)
        self._delivery = Delivery(batches, is_pinned=self._is_pinned)

    def walk(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """See `Residence`."""
        for batch in batches:
            self._delivery.lend(batch)
            yield batch
            self._delivery.send(batch)
