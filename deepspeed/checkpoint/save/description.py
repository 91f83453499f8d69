"""What the ranks say of the pieces that they are about to write, and the table that rank 0 makes of it.

    rank r    pieces ---> [name, shape, dtype, start, length, cut], ...  --.
                          or nothing: as last time                         +--> rank 0: does it cover every tensor once?

[Note: said once] From one save to the next the layout stays, and the table with it. So a rank whose pieces are those of the
save before sends nothing, and rank 0 takes what it kept. Ranks and rank 0 keep the same: each what it said in a start that
all ranks went through (`keep`), and nothing after one that failed, which all of them meet (`forget`).

Does not live here: the pieces (`writer.Piece`, made by the engine), the manifest (`disk.manifest`). Called by `writer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from pydantic import JsonValue

from deepspeed.checkpoint.disk import names
from deepspeed.checkpoint.disk.container import dtype_name
from deepspeed.checkpoint.disk.manifest import CutEntry, Fragment, TensorEntry, find_cover_fault
from deepspeed.common.wording import some
from deepspeed.errors import CheckpointError
from deepspeed.sharding.cut import Cut

if TYPE_CHECKING:
    from deepspeed.checkpoint.save.piece import Piece

__all__ = ["Described", "Description", "Descriptions", "cut_of", "describe"]

Description = tuple[str, list[int], str, int, int, dict[str, Any] | None]


def cut_of(piece: Piece) -> Cut | None:
    """How the elements of a piece's tensor are stored; None: in their own order."""
    return None if piece.cut is None or piece.cut.is_in_order else piece.cut


def describe(piece: Piece) -> Description:
    """A piece for rank 0: `(name, shape, dtype, start, length, cut)`.

    Raises:
        CheckpointError: a file cannot hold it.
    """
    data = piece.data
    if data.layout != torch.strided or data.device.type == "meta":
        raise CheckpointError(
            f"tensor {piece.name!r} is {data.layout} on {data.device}; a checkpoint holds dense tensors with "
            f"data. Convert it, for example with .to_dense()."
        )
    dtype = dtype_name(data.dtype, f"tensor {piece.name!r}")
    cut = cut_of(piece)
    return piece.name, list(piece.shape), dtype, piece.start, data.numel(), None if cut is None else _described(cut)


class Descriptions:
    """What one rank said last, and on rank 0 what all said; see [Note: said once]. One object serves saves to one place."""

    def __init__(self) -> None:
        self._said: list[Description] | None = None
        self._saying: list[Description] | None = None
        self._of_ranks: list[list[Description]] = []
        self._tensors: dict[str, TensorEntry] = {}

    def own(self, described: list[Description]) -> JsonValue:
        """What this rank says of its pieces now; None: as last time."""
        self._saying = described
        return None if described == self._said else cast("JsonValue", described)

    def join(self, reports: Sequence[JsonValue]) -> dict[str, TensorEntry]:
        """On rank 0: what `own` gave on each rank, as the tensors of the manifest, sorted by name.

        Raises:
            CheckpointError: a hole, an overlap, or ranks that disagree about a shape or dtype.
        """
        if self._tensors and all(report is None for report in reports):
            return self._tensors
        kept = self._of_ranks
        said = cast("Sequence[list[Description] | None]", reports)
        self._of_ranks = [kept[rank] if each is None else each for rank, each in enumerate(said)]  # [Note: said once]
        self._tensors = _join(self._of_ranks)
        return self._tensors

    def keep(self) -> None:
        """All ranks went through the start of a save: the next one may refer to it."""
        self._said = self._saying

    def forget(self) -> None:
        """The start of a save failed, on all ranks: the next one says everything."""
        self._said = self._saying = None
        self._of_ranks, self._tensors = [], {}


@lru_cache(maxsize=1024)
def _described(cut: Cut) -> dict[str, Any]:
    return CutEntry.of(cut).model_dump()


class Described(NamedTuple):
    """What a rank said of a tensor, without where its piece lies."""

    shape: list[int]
    dtype: str
    cut: dict[str, Any] | None

    def entry(self, fragments: list[Fragment]) -> TensorEntry:
        """The tensor in a manifest."""
        cut = None if self.cut is None else CutEntry.model_validate(self.cut)
        return TensorEntry(shape=self.shape, dtype=self.dtype, fragments=fragments, cut=cut)

    @property
    def stored_numel(self) -> int:
        """Elements that are stored."""
        return self.entry([]).stored_numel

    def is_whole(self, length: int) -> bool:
        """Whether a fragment of this length is the tensor as it is."""
        return self.cut is None and length == prod(self.shape)

    def require_same(self, other: Described, name: str, rank: int, other_rank: int) -> None:
        """See that another rank describes the same tensor.

        Raises:
            CheckpointError: it does not.
        """
        if self == other:
            return
        is_same_form = self[:2] == other[:2]
        own, others = (
            (f"cut as {self.cut}", f"cut as {other.cut}")
            if is_same_form
            else (f"{self.dtype} {self.shape}", f"{other.dtype} {other.shape}")
        )
        raise CheckpointError(
            f"tensor {name!r} is {own} on rank {rank}, but {others} on rank {other_rank}. All ranks must describe the same "
            "global tensor."
        )


def _join(descriptions: Sequence[Sequence[Description]]) -> dict[str, TensorEntry]:
    """Put the pieces of all ranks together."""
    described: dict[str, tuple[Described, int]] = {}
    fragments: dict[str, list[Fragment]] = {}
    for rank, pieces in enumerate(descriptions):
        for name, shape, dtype, start, length, cut in pieces:
            own = Described(shape, dtype, cut)
            first, first_rank = described.setdefault(name, (own, rank))
            own.require_same(first, name, rank, first_rank)
            of_name = fragments.setdefault(name, [])
            if length:
                key = names.fragment_key(name, start, is_whole=own.is_whole(length))
                of_name.append(Fragment(start=start, length=length, file=names.shard_file(rank), key=key))
    entries = {}
    for name in sorted(fragments):
        of_name = sorted(fragments[name], key=lambda fragment: fragment.start)
        entries[name] = described[name][0].entry(of_name)
        spans = [(fragment.start, fragment.length) for fragment in of_name]
        fault = find_cover_fault(entries[name].stored_numel, spans)
        if fault:
            files = some([f"{part.start}+{part.length} from {part.file}" for part in of_name], 8, "nothing")
            raise CheckpointError(f"tensor {name!r} {fault}. The ranks gave (start+length): {files}. Nothing was written.")
    return entries
