"""Writing a checkpoint: every rank its shard, then one commit that all ranks agree on.

    start    every rank   describe pieces ---> rank 0: do they cover every tensor once? make .<tag>.writing-<token>/
    finish   every rank   write its shard, fsync ---> rank 0: client_state.json, manifest.json, fsync, rename, `latest`

Before the rename nothing of the previous checkpoint is touched, after it the new one is whole. Both steps end in one verdict
for all ranks (`agreement.together`). Only `start` looks at the live state; a save in the background copies it then and calls
`finish` in a thread (`background`). Does not live here: what is worth saving (the engine decides that).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from math import prod
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from pydantic import JsonValue
from torch import Tensor

from deepspeed.checkpoint.agreement import Ranks, ranks_of, together
from deepspeed.checkpoint.disk import names, strict_json
from deepspeed.checkpoint.disk.client_state import encode_client_state
from deepspeed.checkpoint.disk.container import Entry, dtype_name, write_container
from deepspeed.checkpoint.disk.folders import claim, clean, new_token, point_latest, retire, settle, swap_in
from deepspeed.checkpoint.disk.manifest import VERSION, FileEntry, Fragment, Manifest, TensorEntry, find_cover_fault
from deepspeed.checkpoint.disk.storage import Lock, Storage
from deepspeed.common.deferred import DeferredTensor
from deepspeed.common.logging import get_logger
from deepspeed.errors import CheckpointError, FileIoError
from deepspeed.version import version

__all__ = ["Committed", "Content", "Piece", "StartedSave", "start_checkpoint", "write_checkpoint"]

_logger = get_logger(__name__)


@dataclass(frozen=True)
class Piece:
    """Elements `[start, start + data.numel())` of the flattened global tensor `name`, to be written by this rank.

    `data` may have any shape, strides and device; its elements are taken in row-major order. Only they are written, not the
    storage that it may be a view of. A deferred one is read when it is written, or copied. An empty piece of a tensor that
    has elements is allowed and writes nothing.
    """

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor, equal on all ranks."""

    start: int
    data: Tensor | DeferredTensor

    @classmethod
    def whole(cls, name: str, data: Tensor) -> Piece:
        """A tensor that this rank writes all of."""
        return cls(name, tuple(data.shape), 0, data)


def write_checkpoint(
    save_dir: str | os.PathLike[str],
    tag: str,
    pieces: Iterable[Piece],
    state: Mapping[str, Any],
    client_state: Mapping[str, Any],
    *,
    rank: int,
    world_size: int,
    rank_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    group: Any = None,
    storage: Storage | None = None,
) -> Path:
    """Write one checkpoint. Collective: every rank of `group` calls it; it returns when the checkpoint is on the disk.

    Args:
        save_dir: folder of all tags, on a file system that all ranks see; created when it lacks.
        tag: name of this checkpoint. Rank 0's counts (see `tag_agreement.check_tags`).
        pieces: what this rank writes. Over all ranks the pieces cover each tensor exactly once.
        state: what the engine keeps besides tensors; rank 0's is stored. Anything that `encode_client_state` takes.
        client_state: what the user keeps; rank 0's is stored.
        rank: this rank in `group`.
        world_size: ranks of `group`.
        rank_state: what differs by rank (random generators, data position); every rank's is stored.
        save_latest: let `latest` name this tag afterwards.
        group: process group of the ranks that save; None for all. A background save needs a group of its own.
        storage: where bytes go; None for the file system.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: on all ranks alike, naming rank and file, tensor or place in the state; what was there is intact.
        ArgumentError: on all ranks alike, a tag that cannot name a folder.
    """
    content = Content(pieces, lambda: state, lambda: client_state, lambda: rank_state or {})
    ranks = ranks_of(rank, world_size, group)
    started = start_checkpoint(save_dir, tag, content, ranks, save_latest=save_latest, storage=storage)
    return started.finish(ranks).folder


class Held(Protocol):
    """A copy of a rank's pieces that is being made."""

    def pieces(self) -> list[Piece]:
        """The pieces, with data of their own that no later change of the state reaches. Blocks until that is complete."""


Hold = Callable[[list[Piece]], Held | None]
"""Begins to copy; None where it cannot."""


@dataclass(frozen=True)
class Content:
    """What goes into a checkpoint: the arguments of `write_checkpoint` that say so.

    They are taken while all ranks describe, so that an error in one of them is an error on all ranks; not collective.
    """

    pieces: Iterable[Piece]
    state: Callable[[], Mapping[str, Any]]
    """Asked on rank 0."""
    client_state: Callable[[], Mapping[str, Any]]
    """Asked on rank 0."""
    rank_state: Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class Committed:
    """A checkpoint that is on the disk, with the bytes of all its files."""

    folder: Path
    nbytes: int


def start_checkpoint(
    save_dir: str | os.PathLike[str],
    tag: str,
    content: Content,
    ranks: Ranks,
    *,
    hold: Hold | None = None,
    check: Callable[[], None] = lambda: None,
    save_latest: bool = True,
    storage: Storage | None = None,
) -> StartedSave:
    """The part of a save that looks at the live state. Collective over `ranks`; `finish` of the result must follow.

    Everything that a user can do wrong is found here: states that cannot be stored, tensors that do not fit together, a
    folder that cannot be made.

    Args:
        save_dir: as for `write_checkpoint`.
        tag: as for `write_checkpoint`.
        content: as for `write_checkpoint`.
        ranks: those that save.
        hold: copies the state. Left out, or where it cannot on some rank: the state must not change until `finish` has
            returned.
        check: called on rank 0 first; what it raises, all ranks raise.
        save_latest: as for `write_checkpoint`.
        storage: as for `write_checkpoint`.

    Raises:
        CheckpointError, ArgumentError: as `write_checkpoint`.
    """
    save = StartedSave(Path(save_dir), tag, ranks.rank, storage or Storage(), save_latest)
    try:
        verdict = together(ranks, lambda: save.describe(content, hold, check), save.prepare)
        save.go_on(cast("dict[str, JsonValue]", verdict))
    except BaseException:
        save.close()
        raise
    return save


class StartedSave:
    """One save on one rank. The methods run in the order in which they stand here; `prepare` and `commit` on rank 0 only.

    Attributes:
        save_dir: folder of all tags.
        tag: name of the checkpoint.
        is_held: every rank holds a copy of what it writes, so the state may change before `finish`.
        nbytes: of this rank's pieces.
    """

    def __init__(self, save_dir: Path, tag: str, rank: int, storage: Storage, save_latest: bool) -> None:
        self.is_held = False
        self.nbytes = 0
        self._rank = rank
        self._world_size = 0
        self.save_dir = save_dir
        self.tag = tag
        self._storage = storage
        self._save_latest = save_latest
        self._token = new_token()
        self._pieces: list[Piece] = []
        self._held: Held | None = None
        self._copy_fault: FileIoError | None = None
        self._state: JsonValue = None
        self._client_state: JsonValue = None
        self._rank_state: JsonValue = None
        self._tensors: dict[str, TensorEntry] = {}
        self._working: Path | None = None
        self._working_name = ""
        self._lock: Lock | None = None

    @property
    def is_kept(self) -> bool:
        """Whether a checkpoint comes of it; not with a storage that only takes the time."""
        return self._storage.is_kept

    def describe(self, content: Content, hold: Hold | None, check: Callable[[], None]) -> JsonValue:
        """Collect what this rank writes, begin to copy it where that is asked for, and describe each piece meanwhile."""
        rank = self._rank
        if rank == 0:
            check()
        self._pieces = list(content.pieces)
        self._rank_state = self._take(
            content.rank_state(), "rank_state", lambda number: names.rank_state_tensor(rank, number)
        )
        if rank == 0:
            self._state = self._take(content.state(), "state", names.state_tensor)
            self._client_state = self._take(content.client_state(), "client_state", names.client_state_tensor)
        for piece in self._pieces:
            _check(piece)
        self.nbytes = sum(piece.data.nbytes for piece in self._pieces)
        self._held = None if hold is None else hold(self._pieces)
        descriptions: list[JsonValue] = [_description(piece) for piece in self._pieces]
        return {"pieces": descriptions, "is_held": self._held is not None}

    def prepare(self, reports: list[JsonValue]) -> JsonValue:
        """On rank 0: see that the pieces of all ranks cover each tensor once; make the folder."""
        described = cast("list[dict[str, JsonValue]]", reports)
        self._world_size = len(described)
        self._tensors = _join([report["pieces"] for report in described])
        final = names.new_tag_folder(self.save_dir, self.tag)
        try:
            for parent in {self.save_dir, final.parent}:
                clean(parent, self._storage)
            working, self._lock = claim(final, self._storage)
            self._working = working
        except OSError as error:
            raise CheckpointError(
                f"could not make a folder for tag {self.tag!r} in {self.save_dir}: {error}. {_cure(error)}"
            ) from error
        return {
            "working": str(working.relative_to(self.save_dir)),
            "is_held": all(report["is_held"] for report in described),
        }

    def go_on(self, verdict: Mapping[str, JsonValue]) -> None:
        """Take over what rank 0 found, and wait for the copy."""
        self._use_copy()
        self._working_name = str(verdict["working"])
        self.is_held = bool(verdict["is_held"])

    def finish(self, ranks: Ranks) -> Committed:
        """Write and commit. Collective over `ranks`, the same as at the start or others of equal order; in any thread.

        Raises:
            CheckpointError: on all ranks alike, naming rank and file; what was there is intact.
        """
        try:
            verdict = cast("dict[str, Any]", together(ranks, self.write_shard, self.commit))
        finally:
            self.close()
        return Committed(Path(self.save_dir, verdict["folder"]), verdict["nbytes"])

    def write_shard(self) -> JsonValue:
        """Write this rank's file; return its entry, or None where this rank has nothing to write."""
        if self._copy_fault is not None:
            raise CheckpointError(
                f"checkpoint {self.tag!r} in {self.save_dir}: state of this rank could not be read: {self._copy_fault}"
            ) from self._copy_fault
        entries = [_entry(piece) for piece in self._pieces if piece.data.numel()]
        metadata = {names.RANK_STATE_FIELD: strict_json.dumps(self._rank_state)} if self._rank_state else {}
        if not entries and not metadata:
            return None
        path = self.save_dir / self._working_name / names.shard_file(self._rank)
        try:
            with self._storage.create(path) as file:
                write_container(file, entries, metadata)
                return file.finish().model_dump()
        except FileIoError as error:
            raise CheckpointError(
                f"could not write {path.name} of checkpoint {self.tag!r} in {self.save_dir}: {error} Any earlier checkpoint "
                "is intact."
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"could not write {path.name} of checkpoint {self.tag!r} in {self.save_dir}: {error}. "
                f"Any earlier checkpoint is intact. {_cure(error)}"
            ) from error

    def commit(self, shards: list[JsonValue]) -> JsonValue:
        """On rank 0: write what describes the shards, then make the folder the checkpoint."""
        assert self._working is not None  # prepare ran on this rank
        final = names.tag_folder(self.save_dir, self.tag)
        doing = f"write {names.CLIENT_STATE_FILE}"
        try:
            text = strict_json.dumps(self._client_state, indent=1).encode()
            files = {names.CLIENT_STATE_FILE: self._storage.write_file(self._working / names.CLIENT_STATE_FILE, text)}
            files |= {names.shard_file(rank): FileEntry.model_validate(shard) for rank, shard in enumerate(shards) if shard}
            doing = f"write {names.MANIFEST_FILE}"
            manifest = self._storage.write_file(self._working / names.MANIFEST_FILE, self._manifest(files).dump())
            doing = f"rename the finished folder to {final.name}"
            old = swap_in(self._working, final, self._token, self._storage)
            self._working = None  # committed: from here on, errors leave the new checkpoint whole
            doing = f"make the rename to {final.name} durable"
            settle(old, final, self._storage)
            if self._save_latest:
                doing = f"let the file {names.LATEST_FILE!r} name it"
                point_latest(self.save_dir, self.tag, self._token, self._storage)
        except OSError as error:
            state = "The new checkpoint is whole." if self._working is None else "Any earlier checkpoint is intact."
            raise CheckpointError(
                f"saving checkpoint {self.tag!r} in {self.save_dir}: could not {doing}: {error}. {state} {_cure(error)}"
            ) from error
        nbytes = manifest.nbytes + sum(file.nbytes for file in files.values())
        return {"folder": str(final.relative_to(self.save_dir)), "nbytes": nbytes}

    def _use_copy(self) -> None:
        """Wait for the copy. What could not be read for it is said when all ranks write, so that all raise together."""
        held, self._held = self._held, None
        if held is not None:
            try:
                self._pieces = held.pieces()
            except FileIoError as error:
                self._copy_fault = error

    def close(self) -> None:
        """Remove what was not committed, give the folder free, and let go of the data."""
        self._use_copy()  # where ranks disagreed while it was made: its memory must not be given away under it
        self._pieces = []
        if self._working is not None:
            try:
                retire(self._working, names.tag_folder(self.save_dir, self.tag), self._storage)
            except OSError as error:
                _logger.warning("could not remove the unfinished %s: %s. The next save tries again.", self._working, error)
        if self._lock is not None:
            self._lock.release()

    def _take(self, values: Mapping[str, Any], what: str, tensor_name: Callable[[int], str]) -> JsonValue:
        """Encode a state; its tensors become pieces that this rank writes."""
        encoded, tensors = encode_client_state(dict(values), what)
        self._pieces += [Piece.whole(tensor_name(number), tensor) for number, tensor in enumerate(tensors)]
        return encoded

    def _manifest(self, files: dict[str, FileEntry]) -> Manifest:
        return Manifest(
            format="deepspeed-checkpoint",
            version=VERSION,
            library=version,
            saved_at=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
            world_size=self._world_size,
            files=files,
            tensors=self._tensors,
            state=self._state,
        )


def _check(piece: Piece) -> None:
    """Refuse what a file cannot hold."""
    if piece.data.layout != torch.strided or piece.data.device.type == "meta":
        raise CheckpointError(
            f"tensor {piece.name!r} is {piece.data.layout} on {piece.data.device}; a checkpoint holds dense tensors with "
            f"data. Convert it, for example with .to_dense()."
        )
    dtype_name(piece.data.dtype, f"tensor {piece.name!r}")


def _description(piece: Piece) -> JsonValue:
    """A piece for rank 0: `[name, shape, dtype, start, length]`."""
    dtype = dtype_name(piece.data.dtype, f"tensor {piece.name!r}")
    return [piece.name, list(piece.shape), dtype, piece.start, piece.data.numel()]


def _entry(piece: Piece) -> Entry:
    """How a piece stands in its file: a whole tensor in its own shape, a fragment flat."""
    is_whole = piece.data.numel() == prod(piece.shape)
    shape = piece.shape if is_whole else (piece.data.numel(),)
    return Entry(names.fragment_key(piece.name, piece.start, is_whole=is_whole), shape, piece.data)


def _join(descriptions: list[JsonValue]) -> dict[str, TensorEntry]:
    """Put the pieces of all ranks together, sorted by tensor name.

    Raises:
        CheckpointError: a hole, an overlap, or ranks that disagree about a shape or dtype.
    """
    described: dict[str, tuple[list[int], str, int]] = {}
    fragments: dict[str, list[Fragment]] = {}
    for rank, pieces in enumerate(cast("list[list[tuple[str, list[int], str, int, int]]]", descriptions)):
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
            files = ", ".join(f"{part.start}+{part.length} from {part.file}" for part in of_name[:8])
            raise CheckpointError(
                f"tensor {name!r} {fault}. The ranks gave (start+length): {files or 'nothing'}. Nothing was written."
            )
    return {
        name: TensorEntry(shape=described[name][0], dtype=described[name][1], fragments=fragments[name])
        for name in sorted(fragments)
    }


def _cure(error: OSError) -> str:
    """What to do about a refusal of the system."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free space, or save to another disk, and save again."
    if error.errno == errno.ENOENT:
        return "The folder that rank 0 made is not there: save_dir must be on a file system that all ranks see."
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return "A file stands where a folder is needed. Remove it, or give another save_dir or tag."
    return "Correct the cause and save again."
