r"""The micro-batches of one batch, taken from the iterator before anything is computed, and announced to all stages.

    first stage   inputs x n --\                            all gather: how many, what they look like, did it fail?
    last stage    labels x n ---+-- announcement --> every rank: go on with these signatures, or raise the same error
    others        nothing    --/

So an iterator that ends early stops all ranks before any work, and the engine stays usable.

Lives here: taking and announcing. Does not live here: what signatures are for (`pipe.transport`). The engine calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from deepspeed import comm
from deepspeed.comm.watch import naming
from deepspeed.common.pytree import move_to_device
from deepspeed.engine.pipeline_batch import MicroBatch
from deepspeed.errors import PipelineDataEndedError, PipelineError
from deepspeed.pipe.forms import digest, take_apart
from deepspeed.topology.mesh import ParallelMesh

__all__ = ["Announced", "BatchSource", "pair_of"]

_GOOD, _ENDED, _FAILED = 0, 1, 2
_CURE_OF_ENDED = (
    " Give every batch as many micro-batches as engine.micro_batches says: drop a shorter last batch, or repeat the data "
    "(deepspeed.utils.RepeatingLoader)."
)


class Announced(NamedTuple):
    """A batch that all stages know of."""

    micro_batches: list[MicroBatch]
    signatures: list[int]
    """Of each micro-batch's inputs, equal where they look the same to the stages; the same on all stages."""

    forgets: bool
    """Some stage asked for everything to be described anew."""


class _Taken(NamedTuple):
    micro_batches: list[MicroBatch]
    state: int = _GOOD
    text: str = ""
    cause: Exception | None = None


class BatchSource:
    """What this rank takes from iterators.

    Args:
        mesh: of the ranks.
        device: where tensors go.

    Attributes:
        batch_fn: turns what the iterator gives into (inputs, labels); None: it is that already.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        self._mesh = mesh
        self._device = device
        axis = mesh.axis("pipe")
        self._is_first, self._is_last = axis.rank == 0, axis.rank == axis.size - 1
        self.batch_fn: Callable[[Any], Any] | None = None

    def take(self, iterator: Iterator[Any] | None, count: int, *, mode: str, forgets: bool = False) -> Announced:
        """Take the micro-batches of a batch. Collective over all stages and data-parallel ranks.

        Args:
            iterator: gives micro-batches; read on the first and the last stage only.
            count: how many.
            mode: what the batch is for: stages answer the same inputs differently in training and evaluation.
            forgets: ask for everything to be described anew.

        Raises:
            PipelineDataEndedError: on every rank, when the iterator of any ended too early.
            PipelineError: on every rank, when the iterator of any failed.
        """
        taken = self._taken(iterator, count)
        signatures = [0] * count
        if self._is_first and taken.state == _GOOD:
            signatures = [digest(take_apart(each.inputs)[0], mode) for each in taken.micro_batches]
        state, forgets, signatures = self._told(taken.state, forgets, signatures)
        if state != _GOOD:
            self._raise_together(taken, state)
        micro_batches = taken.micro_batches or [MicroBatch()] * count
        return Announced(micro_batches, signatures, forgets)

    def _taken(self, iterator: Iterator[Any] | None, count: int) -> _Taken:
        if not (self._is_first or self._is_last):
            return _Taken([])
        found: list[MicroBatch] = []
        try:
            if iterator is None:
                raise PipelineError("there is no data: give train_batch() a data_iter, or initialize() training_data")
            for _ in range(count):
                batch = next(iterator)
                found.append(self._micro_batch(batch if self.batch_fn is None else self.batch_fn(batch)))
        except StopIteration as error:
            return _Taken(found, _ENDED, f"the data iterator ended after {len(found)} of {count} micro-batches", error)
        except Exception as error:  # whatever a data set raises: all ranks are told, and raise it together
            return _Taken(found, _FAILED, f"the data iterator failed: {type(error).__name__}: {error}", error)
        return _Taken(found)

    def _micro_batch(self, batch: Any) -> MicroBatch:
        inputs, labels = pair_of(batch)
        return MicroBatch(
            move_to_device(inputs, self._device) if self._is_first else None,
            move_to_device(labels, self._device) if self._is_last else None,
        )

    def _told(self, state: int, forgets: bool, signatures: list[int]) -> tuple[int, bool, list[int]]:
        """The worst state and any wish of all ranks, and the signatures of the first stage."""
        pipe, data = self._mesh.axis("pipe"), self._mesh.data_parallel
        mine = torch.tensor([state, int(forgets), *signatures], dtype=torch.int64, device=self._device)
        with naming("announcement of a batch"):
            if pipe.size > 1:
                rows = torch.empty(pipe.size, mine.numel(), dtype=torch.int64, device=self._device)
                comm.all_gather_into_tensor(rows.view(-1), mine, group=pipe.group)
                signatures = rows[0, 2:].tolist()
                mine = rows[:, :2].amax(dim=0)
            worst = mine[:2].contiguous()
            if data.size > 1:
                comm.all_reduce(worst, op=comm.ReduceOp.MAX, group=data.group)
        state, any_forgets = worst.tolist()
        return state, bool(any_forgets), signatures

    def _raise_together(self, taken: _Taken, state: int) -> None:
        ranks = self._mesh.pipe_data
        texts: list[Any] = [taken.text]
        if ranks.size > 1:
            texts = [None] * ranks.size
            comm.all_gather_object(texts, taken.text, group=ranks.group)
        stages = self._mesh.axis("pipe").size
        told = [
            f"stage {position * stages // ranks.size} (rank {rank}): {text}"
            for position, (rank, text) in enumerate(zip(ranks.ranks, texts, strict=True))
            if text
        ]
        kind = PipelineDataEndedError if state == _ENDED else PipelineError
        cure = _CURE_OF_ENDED if state == _ENDED else ""
        raise kind(f"{'; '.join(told)}. Nothing was computed, and the engine can go on.{cure}") from taken.cause


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Inputs and labels; what is no tuple or list, or has one element, is inputs alone."""
    if not isinstance(batch, tuple | list) or not batch:
        return batch, None
    if len(batch) > 2:
        raise PipelineError(
            f"it gave a {type(batch).__name__} of {len(batch)}, and (inputs, labels) are needed: others would be lost. "
            "Put several inputs into one tuple, ((a, b), labels), or say how with engine.set_batch_fn(fn)"
        )
    return batch[0], batch[1] if len(batch) == 2 else None
