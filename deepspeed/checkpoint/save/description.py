"""What the ranks say of the pieces that they are about to write, and the table that rank 0 makes of it.

    rank r    pieces ---> [name, shape, dtype, start, length], ...  --.
                          or nothing: as last time                    +--> rank 0: does it cover every tensor once?

[Note: said once] From one save to the next the layout stays, and the table with it. So a rank whose pieces are those of the
save before sends nothing, and rank 0 takes what it kept. Ranks and rank 0 keep the same: each what it said in a start that
all ranks went through (`keep`), and nothing after one that failed, which all of them meet (`forget`).

Does not live here: the pieces (`writer.Piece`, made by the engine), the manifest (`disk.manifest`). Called by `writer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, cast

import torch
from pydantic import JsonValue

from deepspeed.checkpoint.disk import names
from deepspeed.checkpoint.disk.container import dtype_name
from deepspeed.checkpoint.disk.manifest import Fragment, TensorEntry, find_cover_fault
from deepspeed.common.wording import some
from deepspeed.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed.checkpoint.save.piece import Piece

__all__ = ["Descriptions", "describe"]

_Description = tuple[str, list[int], str, int, int]


def describe(piece: Piece) -> _Description:
    """A piece for rank 0: `(name, shape, dtype, start, length)`.

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
    return piece.name, list(piece.shape), dtype, piece.start, data.numel()


class Descriptions:
    """What one rank said last, and on rank 0 what all said; see [Note: said once]. One object serves saves to one place."""

    def __init__(self) -> None:
        self._said: list[_Description] | None = None
        self._saying: list[_Description] | None = None
        self._of_ranks: list[list[_Description]] = []
        self._tensors: dict[str, TensorEntry] = {}

    def own(self, described: list[_Description]) -> JsonValue:
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
        said = cast("Sequence[list[_Description] | None]", reports)
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


def _join(descriptions: Sequence[Sequence[_Description]]) -> dict[str, TensorEntry]:
    """Put the pieces of all ranks together."""
    described: dict[str, tuple[list[int], str, int]] = {}
    fragments: dict[str, list[Fragment]] = {}
    for rank, pieces in enumerate(descriptions):
        for name, shape, dtype, start, length in pieces:
            first_shape, first_dtype, first_rank = described.setdefault(name, (shape, dtype, rank))
            if (shape, dtype) != (first_shape, first_dtype):
                raise CheckpointError(
                    f"tensor {name!r} is {dtype} {shape} on rank {rank}, but {first_dtype} {first_shape} on rank "
                    f"{first_rank}. All ranks must describe the same global tensor."
                )
            of_name = fragments.setdefault(name, [])
            if length:
                key = names.fragment_key(name, start, is_whole=length == prod(shape))
                of_name.append(Fragment(start=start, length=length, file=names.shard_file(rank), key=key))
    for name, of_name in fragments.items():
        of_name.sort(key=lambda fragment: fragment.start)
        fault = find_cover_fault(prod(described[name][0]), [(fragment.start, fragment.length) for fragment in of_name])
        if fault:
            files = some([f"{part.start}+{part.length} from {part.file}" for part in of_name], 8, "nothing")
            raise CheckpointError(f"tensor {name!r} {fault}. The ranks gave (start+length): {files}. Nothing was written.")
    return {
        name: TensorEntry(shape=described[name][0], dtype=described[name][1], fragments=fragments[name])
        for name in sorted(fragments)
    }
