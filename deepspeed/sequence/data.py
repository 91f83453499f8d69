"""Batches cut along the sequence: each rank of a group gets its tokens of the same samples.

    loader of rank 0: batch a, c, ..       a[:, :half] on rank 0, a[:, half:] on rank 1
    loader of rank 1: batch b, d, ..       b[:, :half] on rank 0, b[:, half:] on rank 1, then c, d, ..

Lives here: the adapter around a loader, and the functions it is made of, for loops of one's own. Called by Accelerate
(through the door `runtime.sequence_parallel.ulysses_sp`) and users.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from deepspeed import comm
from deepspeed.errors import ArgumentError
from deepspeed.sequence.exchange import Lengths

__all__ = ["UlyssesSPDataLoaderAdapter", "own_part", "pad_batch"]

logger = logging.getLogger(__name__)

# [Note: a loader made of this one] To go on in the middle of an epoch, Accelerate and the Trainer make a loader anew out of
# what a loader says of itself (dataset, batch sampler, collate_fn, workers), without the batches that have been. Of an
# adapter that would be a loader of whole batches, and each rank would train on other tokens than its part. So an adapter
# says what a loader of *its parts* is made of: the batch sampler moves the adapter on and gives no index, so the dataset
# is asked for nothing, and `collate_fn` gives the part. All in this process: fetching is collective.
_ALONE: dict[str, Any] = {
    "num_workers": 0,
    "prefetch_factor": None,
    "persistent_workers": False,
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
}
_OF_STREAM: dict[str, Any] = {"batch_size": None, "drop_last": False}

IGNORED = -100
_NEEDED = ("input_ids", "labels", "position_ids")
_PADDING = {"labels": IGNORED, "shift_labels": IGNORED, "attention_mask": 0}


def own_part(batch: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Cut a batch to the tokens of one rank, as evenly as possible; the last ranks have one more where it does not divide.

    Args:
        batch: tensors of (samples, tokens, ...) with `input_ids`, `labels` and `position_ids` of whole sequences; what is no
            tensor is passed whole.
        rank: whose part.
        world_size: how many share the sequence.

    Returns:
        The parts. Instead of `labels` there is `shift_labels`: the next token's label at each token, shifted over the whole
        sequence, -100 at its end.

    Raises:
        ArgumentError: something is missing, tensors have other lengths, or there are fewer tokens than ranks.
    """
    length = _length_of(batch)
    lengths = Lengths.spread(length, world_size)
    start, count = lengths.starts[rank], lengths.tokens[rank]
    whole = {name: value for name, value in batch.items() if name != "labels"}
    whole["shift_labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    return {
        name: value.narrow(1, start, count).contiguous() if isinstance(value, Tensor) else value
        for name, value in whole.items()
    }


def pad_batch(batch: Mapping[str, Any], multiple: int, values: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Lengthen a batch at the end of its sequences until `multiple` divides them. What is padded counts in no loss.

    Args:
        batch: tensors of (samples, tokens, ...) of one length; others are passed as they are.
        multiple: usually the ranks that share a sequence.
        values: of the padding, by name. Without: -100 for labels, 0 for `attention_mask` and all else, and `position_ids`
            count on, so that the padding belongs to the last sample and no causal token sees it.
    """
    given = {**_PADDING, **(values or {})}
    padded = dict(batch)
    length = next((value.shape[1] for value in batch.values() if isinstance(value, Tensor) and value.dim() > 1), 0)
    missing = -length % multiple
    for name, value in batch.items():
        if not missing or not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != length:
            continue
        if name == "position_ids" and name not in given:
            on = value[:, -1:] + torch.arange(1, missing + 1, device=value.device)
            padded[name] = torch.cat([value, on.to(value.dtype)], 1)
        else:
            spare = value.new_full((value.shape[0], missing, *value.shape[2:]), given.get(name, 0))
            padded[name] = torch.cat([value, spare], 1)
    return padded


def _length_of(batch: Mapping[str, Any]) -> int:
    """Tokens of the sequences of a batch."""
    missing = [name for name in _NEEDED if not isinstance(batch.get(name), Tensor)]
    if missing:
        raise ArgumentError(
            f"a batch for sequence parallelism lacks {missing}; it has {sorted(batch)}. Needed: {list(_NEEDED)}, "
            "tensors of (samples, "
            "tokens) of whole sequences. Without packing, position_ids are torch.arange(tokens).expand(samples, tokens)."
        )
    length = batch["input_ids"].shape[1] if batch["input_ids"].dim() > 1 else None
    shapes = {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, Tensor)}
    differing = {name: shape for name, shape in shapes.items() if shape[1:2] != (length,)}
    if length is None or differing:
        raise ArgumentError(
            f"a batch for sequence parallelism has tensors of shapes {differing or shapes} beside input_ids of "
            f"{shapes['input_ids']}; needed the tokens in dimension 1 of each, {length or 'as many as'} of them. Drop "
            "such columns in the collator, "
            "or make them no tensors: then every rank gets them whole."
        )
    return int(length)


class UlyssesSPDataLoaderAdapter:
    """A loader of whole batches, one per rank, made into one of parts: every rank gets its tokens of every rank's batch.

    Each fetch takes one batch of every rank's loader; they are yielded one after another. All ranks of the group go
    through it together; when the loader of one has ended, all end. It may be gone through again.

    Args:
        dl: this rank's loader; ranks of the group have other samples.
        sp_rank: this process's place in the group.
        sp_group: ranks that share sequences.
        sp_world_size: how many they are.
        device: of this rank; batches are yielded on the CPU.
        uneven: lengths need not divide by the ranks: parts then differ by a token. The attention must know that
            (`seq_length_is_variable=True`).
    """

    def __init__(
        self,
        dl: Iterable[Mapping[str, Any]],
        sp_rank: int,
        sp_group: comm.ProcessGroup | None,
        sp_world_size: int,
        device: torch.device | str | None,
        *,
        uneven: bool = False,
    ) -> None:
        self.dl = dl
        self.sp_rank = sp_rank
        self.sp_group = sp_group
        self.sp_world_size = sp_world_size
        self.device = device
        self._uneven = uneven
        self._batches: Iterator[Mapping[str, Any]] | None = None
        self._parts: deque[dict[str, Any]] = deque()
        self.part: dict[str, Any] | None = None

    def __len__(self) -> int:
        """Batches of parts in one pass: those of all ranks."""
        return len(self.dl) * self.sp_world_size  # type: ignore[arg-type]  # a loader without a length says so

    def __getattr__(self, name: str) -> Any:
        """What else the loader has: its dataset, sampler, set_epoch, ...; and see [Note: a loader made of this one]."""
        if name == "dl":  # not there yet: a copy or a pickle is being made
            raise AttributeError(name)
        value = getattr(self.dl, name)
        if name in _ALONE:
            return _ALONE[name]
        if name == "batch_sampler" or (name == "sampler" and _has_no_batch_sampler(self.dl)):
            return PartsInTurn(self)
        if name == "dataset" and isinstance(value, IterableDataset):
            return PartsOfStream(self)
        if isinstance(self._dataset, IterableDataset) and name in _OF_STREAM:
            return _OF_STREAM[name]
        return value

    @property
    def collate_fn(self) -> Callable[[Any], Any]:
        """What the loaders of that note call: it gives the part that is there."""
        return self._given

    def _given(self, samples: Any) -> Any:
        return samples if isinstance(samples, Mapping) else self.part

    @property
    def _dataset(self) -> Any:
        return getattr(self.dl, "dataset", None)

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        """Start anew."""
        self._parts.clear()
        self._batches = iter(self.dl)
        return self

    def __next__(self) -> dict[str, Any]:
        """Return this rank's part of the next batch.

        Raises:
            ArgumentError: on all ranks, a ValueError: a batch lacks something, has tensors of other lengths, or its
            length does
                not divide.
        """
        if not self._parts:
            self.refill()
        self.part = self._parts.popleft()
        return self.part

    def refill(self) -> None:
        """Fetch one batch on every rank and bring them together. Every rank of the group must call it.

        Raises:
            StopIteration: on all ranks, when the loader of one has ended.
        """
        if self._batches is None:
            self._batches = iter(self.dl)
        batch = next(self._batches, None)
        mine = None if batch is None else {name: _on_host(value) for name, value in batch.items()}
        everyone: list[dict[str, Any] | None] = [None] * self.sp_world_size
        comm.all_gather_object(everyone, mine, group=self.sp_group)
        batches = [each for each in everyone if each is not None]
        if len(batches) < len(everyone):
            self._batches = None
            if batches and self.sp_rank == 0:
                logger.warning(
                    "the loaders of %d of %d sequence-parallel ranks have ended before the others': %d batches are "
                    "left out. Give "
                    "each the same number (drop_last, or an even sampler).",
                    len(everyone) - len(batches),
                    len(everyone),
                    len(batches),
                )
            raise StopIteration
        for each in batches:
            length = _length_of(each)
            if length % self.sp_world_size and not self._uneven:
                raise ArgumentError(
                    f"a batch of {length} tokens over {self.sp_world_size} sequence-parallel ranks does not divide; "
                    "needed a multiple of "
                    f"{self.sp_world_size}. Pad in the collator (pad_to_multiple_of={self.sp_world_size}, or "
                    "sequence.pad_batch), or "
                    "make the adapter with uneven=True."
                )
        self._parts.extend(own_part(each, self.sp_rank, self.sp_world_size) for each in batches)


class PartsInTurn:
    """The `batch_sampler` of an adapter: as many batches of indices as there are parts, and each of them is empty.

    Whoever goes through it moves the adapter on. It has what the loader's own batch sampler has besides.
    """

    def __init__(self, adapter: UlyssesSPDataLoaderAdapter) -> None:
        self._adapter = adapter

    def __len__(self) -> int:
        """Parts in one pass."""
        return len(self._adapter)

    def __iter__(self) -> Iterator[list[int]]:
        """Start anew."""
        for _ in self._adapter:
            yield []

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader and its samplers, whichever can be told: a loader made of this one has no other way to."""
        outer = getattr(self._adapter.dl, "batch_sampler", None)
        inner = getattr(outer, "batch_sampler", None)
        for told in (self._adapter.dl, outer, inner):
            if told is not None and hasattr(told, "set_epoch"):
                told.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        if name == "_adapter":  # not there yet: a copy or a pickle is being made
            raise AttributeError(name)
        return getattr(getattr(self._adapter.dl, "batch_sampler", None), name)


class PartsOfStream(IterableDataset[dict[str, Any]]):
    """The `dataset` of an adapter whose loader reads a stream: the parts themselves, to be taken one by one."""

    def __init__(self, adapter: UlyssesSPDataLoaderAdapter) -> None:
        self._adapter = adapter

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Start anew."""
        return iter(self._adapter)


def _has_no_batch_sampler(dl: Any) -> bool:
    return getattr(dl, "batch_sampler", None) is None


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
