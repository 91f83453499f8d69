"""What checkpointed segments were given, between their forward and their backward: where it is, and when it moves.

    forward    segment 1   begin | inputs HERE |
               segment 2   begin | inputs HERE | sealed: those of 1 leave -> shard -> place
               segment 3   begin | inputs HERE | sealed: those of 2 leave; `ahead` segments may be on their way at once
    backward   segment 3   inputs are HERE still
               segment 2   `bring` 2 and, `ahead` of need, 1; value -> all-gather -> the tensor as it was
               segment 1   ...

               keep              leave
        (saved) ---> HERE --------------------> AWAY          taken as often as autograd asks, in either state

The tensor that leaves is copied in memory order, so that it comes back with the strides it had: kernels round alike in
recomputation.

[Note: what stays] Parameters and other leaves that train; what has holes or repeats elements (a slice, an expanded mask);
what is smaller than `min_numel`. A tensor that the next segment was given too (a mask, rotary angles) stays as well:
there is one of it, and moving it for each segment would make many. A tensor that was changed in place while it was HERE
stays, and asking for it raises what autograd would.

Lives here: `Keeper`. Does not live here: places (`places`, `host`, `disk`), shards (`partition`). Called by `segment`
from hooks on saved tensors.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from enum import Enum

import torch
from torch import Tensor

from deepspeed.activations.partition import TensorShards
from deepspeed.activations.places import Place, Rest
from deepspeed.common.saved_tensors import unchanged

__all__ = ["Keeper", "Kept", "KeptState", "Row"]


class KeptState(Enum):
    """See the module's picture."""

    HERE = "here"
    AWAY = "away"


class Row:
    """The inputs of one segment, as far as a graph still holds them."""

    def __init__(self) -> None:
        self._kept: list[weakref.ref[Kept]] = []

    def add(self, kept: Kept) -> None:
        """One more."""
        self._kept.append(weakref.ref(kept))

    def __iter__(self) -> Iterator[Kept]:
        return (kept for each in self._kept if (kept := each()) is not None)

    @property
    def is_alive(self) -> bool:
        """Whether backward may still ask for one."""
        return any(True for _ in self)


class Kept:
    """One saved input; autograd holds it in the tensor's place.

    Attributes:
        row: the segment that it was saved for first.
        is_shared: another segment was given it, too.
    """

    def __init__(self, tensor: Tensor, row: Row) -> None:
        self.row = row
        self.is_shared = False
        self._tensor: Tensor | None = tensor
        self._version = tensor._version
        self._rest: Rest | None = None
        self._shards: TensorShards | None = None
        self._shape, self._strides, self._numel = tensor.shape, tensor.stride(), tensor.numel()

    @property
    def state(self) -> KeptState:
        """Whether the tensor itself is kept."""
        return KeptState.HERE if self._rest is None else KeptState.AWAY

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it is this very tensor, and its values are still those that were saved."""
        return self._tensor is tensor and self._version == tensor._version

    def leave(self, place: Place, shards: TensorShards) -> bool:
        """Move to `place`; False when it stays or has left before."""
        tensor = self._tensor
        if tensor is None or self.is_shared or tensor._version != self._version:
            return False
        flat = _in_memory_order(tensor)
        assert flat is not None  # `Keeper.keep` takes no others
        if shards.cuts(tensor):
            self._shards, flat = shards, shards.own(flat)
        self._rest = place.put(flat)
        self._tensor = None
        return True

    @property
    def rest(self) -> Rest | None:
        """Where it rests; None while it is HERE."""
        return self._rest

    def take(self) -> Tensor:
        """The tensor that was saved. Collective over the tensor-parallel ranks where it rests in shards.

        Raises:
            UsageError: it was changed in place.
            FileIoError: it could not be written or read.
        """
        if self._rest is None:
            assert self._tensor is not None  # HERE
            return unchanged(self._tensor, self._version)
        flat = self._rest.value()
        if self._shards is not None:
            flat = self._shards.whole(flat, self._numel)
        return flat.as_strided(self._shape, self._strides)


class Keeper:
    """Decides for all segments of a process.

    Args:
        place: where inputs rest.
        shards: how they are cut.
        ahead: segments that may be on their way out, and on their way back, at once.
        min_numel: elements from which an input is moved.
    """

    def __init__(self, place: Place, shards: TensorShards, *, ahead: int, min_numel: int) -> None:
        self._place = place
        self._shards = shards
        self._ahead = ahead
        self._min_numel = min_numel
        self._line: list[Row] = []  # in the order of forward
        self._leaving: deque[Row] = deque()
        self._here: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()

    def begin(self) -> Row:
        """A segment begins: its inputs are about to be saved."""
        self._line = [row for row in self._line if row.is_alive]
        row = Row()
        self._line.append(row)
        return row

    def keep(self, tensor: Tensor, row: Row) -> Kept | None:
        """Take charge of an input of the segment of `row`; None: it stays where it is ([Note: what stays]).

        Raises:
            UsageError: it is to be kept in shards, and tensor-parallel ranks have different values; on all of them.
        """
        if not self._moves(tensor):
            return None
        self._shards.compare(tensor)
        known = self._here.get(id(tensor))
        if known is not None and known.is_of(tensor):
            known.is_shared = known.is_shared or known.row is not row
            return known
        kept = Kept(tensor, row)
        row.add(kept)
        self._here[id(tensor)] = kept
        return kept

    def seal(self, row: Row) -> None:
        """All inputs of the segment are saved: those of the segment before may leave.

        Raises:
            FileIoError: an earlier input could not be written.
        """
        for each in self._leaving:
            for rest in _rests(each):
                rest.advance()
        place = self._line.index(row)
        if place > 0:
            earlier = self._line[place - 1]
            left = [kept.leave(self._place, self._shards) for kept in earlier]
            if any(left):
                self._leaving.append(earlier)
        while len(self._leaving) > self._ahead:
            for rest in _rests(self._leaving.popleft()):
                rest.settle()

    def take(self, kept: Kept) -> Tensor:
        """What was saved; see `Kept.take`. The inputs that backward will ask for next are on their way after the call."""
        for row in self._coming(kept.row):
            for rest in _rests(row):
                rest.bring()
        return kept.take()

    def _coming(self, row: Row) -> list[Row]:
        """The segment, and those before it that backward reaches next."""
        if row not in self._line:
            return [row]
        place = self._line.index(row)
        earlier = [each for each in reversed(self._line[:place]) if any(True for _ in _rests(each))]
        return [row, *earlier[: self._ahead]]

    def _moves(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.numel() < self._min_numel:
            return False  # a Parameter, or another class whose memory is its own business
        if tensor.is_leaf and tensor.requires_grad:
            return False
        if tensor.is_complex() or tensor.is_neg() or not self._place.accepts(tensor, is_cut=self._shards.cuts(tensor)):
            return False
        return _in_memory_order(tensor) is not None


def _rests(row: Row) -> Iterator[Rest]:
    return (kept.rest for kept in row if kept.rest is not None)


def _in_memory_order(tensor: Tensor) -> Tensor | None:
    """The elements as they lie in memory, 1-D, a view; None where there are holes or repetitions."""
    by_stride = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.size(dim)), reverse=True)
    ordered = tensor.detach().permute(by_stride)
    return ordered.reshape(-1) if ordered.is_contiguous() else None
