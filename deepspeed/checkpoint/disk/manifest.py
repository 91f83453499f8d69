"""The manifest: a typed description of a whole checkpoint, and its text form with a checksum.

Lives here: the schema (the reference page repeats it), strict parsing, the checks that make it trustworthy, and the
arithmetic of fragments. Does not live here: files (`save.writer`, `reader`).

[Note: checksum] The text ends with a line of fixed length that holds the hash of every byte before it. So one flipped bit
anywhere is noticed, and the file is still plain JSON that any program reads. Later versions must keep this ending.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Annotated, Literal, NamedTuple

import xxhash
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    ValidationError,
    model_validator,
)
from typing_extensions import Self

from deepspeed.checkpoint.disk import strict_json
from deepspeed.checkpoint.disk.names import MANIFEST_FILE, rank_of_shard
from deepspeed.errors import ArgumentError, CheckpointDamagedError, CheckpointError
from deepspeed.sharding.cut import Cut, Span

__all__ = [
    "BLOCK_NBYTES",
    "FORMAT",
    "VERSION",
    "CutEntry",
    "FileEntry",
    "Fragment",
    "Manifest",
    "NodeEntry",
    "Part",
    "TensorEntry",
    "find_cover_fault",
    "parts_of",
    "version_for",
]

FORMAT = "deepspeed-checkpoint"
VERSION = 4
"""1 had a hash of each whole file, 2 those of blocks beside it, from 3 on there are those of blocks alone; 4 has cuts."""

_WITHOUT_CUTS = 3

BLOCK_NBYTES = 16 << 20
"""Bytes of a file that have a hash of their own."""

FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
"""A plain name inside the tag's folder: no manifest can point outside it."""

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
BlockDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
SpanEntry = Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileEntry(_Record):
    """One file of the folder."""

    nbytes: NonNegativeInt = Field(description="Size of the file.")
    xxh3_128: Digest | None = Field(
        default=None,
        description="XXH3 128-bit hash of the file's bytes, in hexadecimal. Only in versions 1 and 2; where there are "
        "`blocks`, they count.",
    )
    blocks: list[BlockDigest] = Field(
        default_factory=list,
        description="XXH3 64-bit hash of each 16 MiB of the file, by which ranks share the check of it; the last block may "
        "be shorter. In version 2 left out where one block is all, in version 1 always.",
    )

    @model_validator(mode="after")
    def _blocks_cover_the_file(self) -> Self:
        if self.blocks and len(self.blocks) != -(-self.nbytes // BLOCK_NBYTES):
            raise ValueError(f"{len(self.blocks)} blocks do not make {self.nbytes} bytes")
        if self.nbytes and not self.blocks and self.xxh3_128 is None:
            raise ValueError(f"{self.nbytes} bytes have no hash")
        return self


class Fragment(_Record):
    """Elements `[start, start + length)` of the flattened tensor, and where they are stored."""

    start: NonNegativeInt = Field(description="First element, in the flattened (row-major) tensor, or in stored order.")
    length: PositiveInt = Field(description="Elements.")
    file: FileName = Field(description="File that holds them.")
    key: str = Field(description="Key of the safetensors tensor inside that file.")
    offset: NonNegativeInt = Field(
        default=0, description="First element inside the flattened stored tensor; left out when 0."
    )


class CutEntry(_Record):
    """How a tensor that ranks hold in parts is stored: the parts one after another, each flattened (row-major)."""

    dim: NonNegativeInt = Field(description="The dimension that is cut.")
    parts: list[list[SpanEntry]] = Field(
        description="Of each part its spans along the dimension, `[start, length]`, in the order in which it holds them. "
        "Together they cover the dimension; an index in several parts is stored as often."
    )

    @classmethod
    def of(cls, cut: Cut) -> CutEntry:
        """The record of a cut."""
        return cls(dim=cut.dim, parts=[[[*span] for span in spans] for spans in cut.parts])

    def cut_of(self, shape: Sequence[int]) -> Cut:
        """The cut of a tensor of this whole shape.

        Raises:
            ArgumentError: there is no such cut of it.
        """
        return Cut(tuple(shape), self.dim, tuple(tuple(Span(*span) for span in spans) for spans in self.parts))


class TensorEntry(_Record):
    """One tensor as the whole job sees it."""

    shape: Annotated[list[NonNegativeInt], Field(description="Global shape; empty for a single value.")]
    dtype: str = Field(description="Element type, in the spelling of safetensors (F32, BF16, ...).")
    fragments: list[Fragment] = Field(description="Sorted by start; they cover every element exactly once.")
    cut: CutEntry | None = Field(
        default=None,
        description="From version 4 on: the order in which the elements are stored; fragments count in it. Left out where "
        "that is the flattened tensor's own order.",
    )

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    @property
    def stored_numel(self) -> int:
        """Elements that are stored: more than the tensor has where parts overlap.

        Raises:
            ArgumentError: the cut is none of this shape.
        """
        return self.numel if self.cut is None else self.cut.cut_of(self.shape).stored_starts()[-1]


class NodeEntry(_Record):
    """In a folder that one of several nodes wrote to its own disk: whose it is. The tensors and files are those of all."""

    save: str = Field(description="Name of the save: equal on all nodes, and different in every save.")
    number: NonNegativeInt = Field(description="Which node this folder is of.")
    hosts: list[str] = Field(description="Machine of each node.")
    node_of_ranks: list[NonNegativeInt] = Field(description="Node of each rank that saved.")

    def home_of(self, file: str) -> int | None:
        """Node that has `file` on its disk; None: every one."""
        rank = rank_of_shard(file)
        return None if rank is None else self.node_of_ranks[rank]


class Manifest(_Record):
    """`manifest.json`. Followed in the file by a `checksum` field, see [Note: checksum]."""

    format: Literal["deepspeed-checkpoint"] = Field(description="What this file is.")
    version: PositiveInt = Field(description="Version of the format; raised when an older reader could misread the folder.")
    library: str = Field(description="Version of the library that wrote it; for people, not for decisions.")
    saved_at: str = Field(description="Time of the save, ISO 8601 in UTC; for people, not for decisions.")
    world_size: PositiveInt = Field(description="Ranks that wrote it.")
    files: dict[FileName, FileEntry] = Field(description="Every other file of the folder that belongs to the checkpoint.")
    tensors: dict[str, TensorEntry] = Field(description="Every tensor, by global name.")
    state: JsonValue = Field(description="What the engine keeps besides tensors, encoded like the client state.")
    node: NodeEntry | None = Field(
        default=None, description="Only where every node wrote to its own disk; left out in a folder that has all files."
    )

    def dump(self) -> bytes:
        """The file's bytes, checksum included."""
        text = strict_json.dumps(self.model_dump(mode="json", exclude_defaults=True), indent=1)
        body = text.removesuffix("\n}").encode()
        return body + _ending(body)

    @classmethod
    def parse(cls, raw: bytes, where: str) -> Manifest:
        """Check and read the bytes of a manifest.

        Args:
            raw: the whole file.
            where: its path, for error texts.

        Raises:
            CheckpointDamagedError: a byte is missing or differs, or the content contradicts itself.
            CheckpointError: it was written by a newer version of the format, or is no manifest of ours.
        """
        body, ending = raw[: -len(_ending(b""))], raw[-len(_ending(b"")) :]
        if ending != _ending(body):
            raise CheckpointDamagedError(
                f"{where} is damaged: {MANIFEST_FILE} does not match its own checksum (cut short, or changed after it was "
                f"written). Nothing was loaded. Load an older tag, or bring the file again from where it was copied."
            )
        try:
            fields = strict_json.loads(raw)
            if not isinstance(fields, dict) or fields.get("format") != FORMAT:
                raise ValueError(f"the field 'format' is not {FORMAT!r}")
            _check_version(fields.get("version"), where)
            fields.pop("checksum")
            manifest = cls.model_validate(fields)
        except (ValueError, ValidationError) as error:
            raise CheckpointError(f"{where} is not a manifest that this version can read: {error}.") from error
        manifest._check_fragments(where)
        return manifest

    def _check_fragments(self, where: str) -> None:
        for name, tensor in self.tensors.items():
            try:
                fault = find_cover_fault(tensor.stored_numel, [(part.start, part.length) for part in tensor.fragments])
            except ArgumentError as error:
                fault = f"has a cut that is none: {error}"
            strangers = sorted({part.file for part in tensor.fragments} - self.files.keys())
            if fault or strangers:
                raise CheckpointDamagedError(f"{where}: tensor {name!r} {fault or f'lies in unlisted files {strangers}'}.")


class Part(NamedTuple):
    """Elements `[at, at + length)` of a request come from `[start, start + length)` of the stored tensor `key` of `file`."""

    file: str
    key: str
    start: int
    length: int
    at: int


def find_cover_fault(numel: int, spans: Sequence[tuple[int, int]]) -> str | None:
    """What keeps `spans` (start, length), sorted by start, from covering `[0, numel)` exactly once; None: nothing does."""
    reached = 0
    for start, length in spans:
        if start > reached:
            return f"has a hole: nobody holds elements {reached} to {start} of {numel}"
        if start < reached:
            return f"has an overlap: elements {start} to {min(reached, start + length)} of {numel} are given twice"
        reached = start + length
    if reached < numel:
        return f"has a hole: nobody holds elements {reached} to {numel} of {numel}"
    if reached > numel:
        return f"has {numel} elements, but the fragments reach to element {reached}"
    return None


def parts_of(fragments: Sequence[Fragment], start: int, length: int) -> Iterator[Part]:
    """Where elements `[start, start + length)` of a tensor lie, in order; `fragments` are sorted and cover them."""
    stop = start + length
    first = max(bisect_right(fragments, start, key=lambda fragment: fragment.start) - 1, 0)
    for fragment in fragments[first:]:
        low, high = max(fragment.start, start), min(fragment.start + fragment.length, stop)
        if low >= stop:
            return
        if low < high:
            yield Part(fragment.file, fragment.key, fragment.offset + low - fragment.start, high - low, low - start)


def version_for(tensors: Mapping[str, TensorEntry]) -> int:
    """Version of a manifest with these tensors: the oldest that can say it, so that older readers read what they can."""
    return VERSION if any(entry.cut is not None for entry in tensors.values()) else _WITHOUT_CUTS


def _check_version(version: JsonValue, where: str) -> None:
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(
            f"{where} has format version {version}; this installation reads up to version {VERSION}. "
            f"It was written by a newer deepspeed: upgrade this one, or save again with the older."
        )


def _ending(body: bytes) -> bytes:
    """The last lines of the file: always of the same length, see [Note: checksum]."""
    return b',\n "checksum": "xxh3_128:' + xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n'
