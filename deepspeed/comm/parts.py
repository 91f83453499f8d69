"""Parts of tensors to all ranks of a group and from all of them: an all-to-all that leaves the layout to the caller.

    exchange    rank 0   [ 0->0 | 0->1 ]         rank 1   [ 1->0 | 1->1 ]
    yields               [ 0->0 | 1->0 ]                  [ 0->1 | 1->1 ]

What leaves is a list of views, of any strides; what arrives is a list of views again, which the caller copies (or adds) to
where it wants them. So a permutation costs no copy of its own: the first copy packs, the second unpacks.

    LocalParts     one rank: nothing moves
    SharedParts    CPU ranks of one host: packed into memory that all map, read there
    BackendParts   all others: packed into one message per rank, one all-to-all of bytes

Lives here: the three ways. Does not live here: the choice and who keeps them (`comm.algorithms.parts_exchanger`, which
callers use), what the parts mean (`sequence.exchange`).

[Note: two slots] In shared memory exchange n writes slot n % 2 of a rank's row. Whoever takes part in exchange n - 1 has
copied what arrived in n - 2, since that is only valid until then; and this rank has waited for all of them in n - 1. So
nobody reads the slot any more, and one wait per exchange is enough.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from deepspeed.comm import collectives
from deepspeed.comm.board import Peers, Progress
from deepspeed.comm.flat import Record
from deepspeed.comm.patience import Patience
from deepspeed.comm.shared_memory import SharedMemory
from deepspeed.errors import CommError

__all__ = [
    "BackendParts",
    "LocalParts",
    "PartsExchanger",
    "SharedOrBackendParts",
    "SharedParts",
    "part_nbytes",
    "row_nbytes",
]

Shape = tuple[int, ...]
_ALIGNMENT = 64
_SLOTS = 2


class PartsExchanger(Protocol):
    """Moves parts between the ranks of one group."""

    def exchange(
        self, leaving: Sequence[Sequence[torch.Tensor]], arriving: Sequence[Sequence[Shape]], nbytes: int
    ) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Give tensor i of `leaving[r]` to group rank r, and yield what came with whose it is: of the shapes `arriving`.

        Every rank of the group calls it, in the same order, and goes through it to its end. This rank's own part is
        first, and not waited for: it is `leaving[rank]`. What is yielded is valid until the next call, and must have
        been copied by then.

        Args:
            leaving: for each group rank the same number of tensors, on the exchanger's device; number i has one dtype
                everywhere.
            arriving: shape of each tensor that comes from each rank.
            nbytes: of the largest part between any two ranks, as `part_nbytes` counts; the same on all ranks.

        Raises:
            CommError: a rank died, is late, or moves parts of other sizes.
        """

    def is_shared(self, nbytes: int) -> bool:
        """Whether `exchange` of such parts goes through memory, and no back end. Every rank of the group asks alike."""


def part_nbytes(shapes: Sequence[Shape], itemsizes: Sequence[int]) -> int:
    """Bytes to set aside for a part of these tensors: their own, and up to 64 of padding after each."""
    own = sum(math.prod(shape) * itemsize for shape, itemsize in zip(shapes, itemsizes, strict=True))
    return own + _ALIGNMENT * len(shapes)


def row_nbytes(largest_nbytes: int, ranks: int) -> int:
    """What each rank adds to the shared memory of an exchange whose largest part is so large: [Note: two slots]."""
    return _SLOTS * ranks * _padded(largest_nbytes)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _cut(memory: torch.Tensor, shapes: Sequence[Shape], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of `memory` (bytes), one after another."""
    views, start = [], 0
    for shape, tensor in zip(shapes, like, strict=True):
        nbytes = math.prod(shape) * tensor.itemsize
        views.append(memory[start : start + nbytes].view(tensor.dtype).view(shape))
        start += _padded(nbytes)
    return views


class LocalParts:
    """One rank: what leaves for it has arrived."""

    def exchange(
        self, leaving: Sequence[Sequence[torch.Tensor]], arriving: Sequence[Sequence[Shape]], nbytes: int
    ) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """See `PartsExchanger`."""
        yield 0, list(leaving[0])

    def is_shared(self, nbytes: int) -> bool:
        """See `PartsExchanger`."""
        return True


class BackendParts:
    """One all-to-all of bytes; any device."""

    def __init__(self, group: Callable[[], torch.distributed.ProcessGroup | None], rank: int) -> None:
        """Store what tells the group, which is not kept alive, and this process's rank in it."""
        self._group = group
        self._rank = rank

    def exchange(
        self, leaving: Sequence[Sequence[torch.Tensor]], arriving: Sequence[Sequence[Shape]], nbytes: int
    ) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """See `PartsExchanger`."""
        itemsizes = [tensor.itemsize for tensor in leaving[0]]
        shapes = [[tuple(tensor.shape) for tensor in part] for part in leaving]
        leaving_nbytes = [part_nbytes(each, itemsizes) for each in shapes]
        arriving_nbytes = [part_nbytes(each, itemsizes) for each in arriving]
        leaving_nbytes[self._rank] = arriving_nbytes[self._rank] = 0
        sent = torch.empty(sum(leaving_nbytes), dtype=torch.uint8, device=leaving[0][0].device)
        for rank, memory in enumerate(torch.split(sent, leaving_nbytes)):
            if rank != self._rank:
                for view, tensor in zip(_cut(memory, shapes[rank], leaving[rank]), leaving[rank], strict=True):
                    view.copy_(tensor)
        received = sent.new_empty(sum(arriving_nbytes))
        work = collectives.all_to_all_single(received, sent, arriving_nbytes, leaving_nbytes, self._group(), async_op=True)
        yield self._rank, list(leaving[self._rank])
        work.wait()
        for rank, memory in enumerate(torch.split(received, arriving_nbytes)):
            if rank != self._rank:
                yield rank, _cut(memory, arriving[rank], leaving[0])

    def is_shared(self, nbytes: int) -> bool:
        """See `PartsExchanger`."""
        return False


class SharedParts:
    """Parts in memory that all ranks map: a rank's row has two slots, each with a place per rank. [Note: two slots]"""

    def __init__(
        self,
        memory: SharedMemory,
        rank: int,
        ranks: Sequence[int],
        patience: Patience,
        record: Record,
        progress: Progress,
    ) -> None:
        """Cut each row into 2 x ranks places; the parameters are those of `comm.shared_reducer.SharedMemoryReducer`."""
        world_size = len(ranks)
        self.capacity_nbytes = memory.rows[0].numel() // (_SLOTS * world_size)
        """Bytes of a place: the largest part that fits."""
        self._places = [row.view(_SLOTS, world_size, self.capacity_nbytes) for row in memory.rows]
        self._rank = rank
        self._ranks = ranks
        self._peers = Peers(memory.board, memory.processes, rank, ranks, patience, "exchange of parts", progress)
        self._board = memory.board
        self._record = record
        self._number = 0
        self._is_under_way = False

    def exchange(
        self, leaving: Sequence[Sequence[torch.Tensor]], arriving: Sequence[Sequence[Shape]], nbytes: int
    ) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """See `PartsExchanger`; `nbytes` is at most `capacity_nbytes`."""
        self.check_idle()
        self._is_under_way = True
        done = self._record(nbytes * self._peers.size, self._peers.size)
        number, kind = self._number + 1, _kind(leaving[0])
        try:
            self._pack(number % 2, leaving)
            self._board.launch(number, nbytes, kind)
            yield self._rank, list(leaving[self._rank])
            self._peers.check_usable()
            self._peers.wait(self._board.launched, number, lambda: f"exchange {number} of parts", "to bring its parts")
            self._check_alike(number, (nbytes, kind))
        except BaseException as error:  # an interrupt too: this rank has lost step with the others
            given_up = isinstance(error, GeneratorExit)
            self._peers.failed(CommError(f"exchange {number} of parts was given up half way") if given_up else error)
            raise
        self._number, self._is_under_way = number, False
        if done is not None:
            done()
        for rank, places in enumerate(self._places):
            if rank != self._rank:
                yield rank, _cut(places[number % 2, self._rank], arriving[rank], leaving[0])

    def check_idle(self) -> None:
        """Raise CommError while an exchange is under way: a second one would write into the first one's slot."""
        self._peers.check_usable()
        if self._is_under_way:
            error = CommError(
                f"rank {self._ranks[self._rank]}: exchange {self._number + 1} of parts over ranks {list(self._ranks)} was "
                "begun and is not over, and another one was asked for. Wait for each before the next; if an exception came "
                "between, ranks have lost step: end the job, and start it again from a checkpoint."
            )
            self._peers.failed(error)
            raise error

    def close(self) -> None:
        """Leave the others, who get an error if they wait for this rank. Not collective."""
        self._peers.close()
        self._places = []

    def _pack(self, slot: int, leaving: Sequence[Sequence[torch.Tensor]]) -> None:
        for rank, part in enumerate(leaving):
            if rank != self._rank:
                memory = self._places[self._rank][slot, rank]
                for view, tensor in zip(_cut(memory, [tuple(each.shape) for each in part], part), part, strict=True):
                    view.copy_(tensor)

    def _check_alike(self, number: int, mine: tuple[int, int]) -> None:
        for rank in range(self._peers.size):
            theirs = self._board.range(rank, number)
            if theirs != mine:
                raise CommError(
                    f"rank {self._ranks[self._rank]}: exchange {number} of parts over ranks {list(self._ranks)} cannot be: "
                    f"here {_count(mine[1])} tensors of {mine[0]} bytes per rank, on rank {self._ranks[rank]} "
                    f"{_count(theirs[1])} of {theirs[0]}{'' if theirs[1] == mine[1] else ', or of other dtypes'}. All ranks "
                    "need tensors of the same sizes and dtypes; of sequences, parts of the same length and heads, or "
                    "lengths that are said to vary."
                )


def _kind(tensors: Sequence[torch.Tensor]) -> int:
    """Their number, and a checksum of their dtypes above it: bytes alone do not tell fp16 from bf16."""
    return zlib.crc32(" ".join(str(tensor.dtype) for tensor in tensors).encode()) << 16 | len(tensors)


def _count(kind: int) -> int:
    return kind & 0xFFFF


class SharedOrBackendParts:
    """CPU ranks: shared memory that grows as parts do, else the back end.

    Args:
        share: makes shared parts with places of that many bytes, or None where ranks share no memory; collective.
        backend: for then.
    """

    def __init__(self, share: Callable[[int], SharedParts | None], backend: BackendParts) -> None:
        self._share = share
        self._backend = backend
        self._shared: SharedParts | None = None
        self._is_shareable = True

    def exchange(
        self, leaving: Sequence[Sequence[torch.Tensor]], arriving: Sequence[Sequence[Shape]], nbytes: int
    ) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """See `PartsExchanger`."""
        way = self._shared if self.is_shared(nbytes) else None
        return (way or self._backend).exchange(leaving, arriving, nbytes)

    def is_shared(self, nbytes: int) -> bool:
        """See `PartsExchanger`; the memory grows here."""
        if self._is_shareable and (self._shared is None or nbytes > self._shared.capacity_nbytes):
            self._grow(nbytes)
        return self._is_shareable

    def _grow(self, nbytes: int) -> None:
        """Collective, since all ranks have the same `nbytes` and the same capacity."""
        if self._shared is not None:
            self._shared.check_idle()
            nbytes = max(nbytes, 2 * self._shared.capacity_nbytes)
            self._shared.close()  # one that has other sizes, and still waits there, is told
        self._shared = self._share(_padded(nbytes))
        self._is_shareable = self._shared is not None
