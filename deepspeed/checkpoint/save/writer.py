"""Writing a checkpoint: every rank its shard, then one commit that all ranks agree on.

    start    every rank   describe pieces ---> rank 0: do they cover every tensor once? make .<tag>.writing-<token>/
    finish   every rank   write its shard, fsync ---> rank 0: client_state.json, manifest.json, fsync, rename, `latest`

Before the rename nothing of the previous checkpoint is touched, after it the new one is whole. Both steps end in one verdict
for all ranks (`agreement.together`). Only `start` looks at the live state; a save in the background begins to copy it then,
and calls `finish`, which waits for the end of the copy, in a thread (`background`). Does not live here: what is worth saving
(the engine decides that).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from math import prod
from pathlib import Path
from typing import Any, Protocol, cast

from pydantic import JsonValue

from deepspeed.checkpoint.agreement import Ranks, together
from deepspeed.checkpoint.disk import names, strict_json
from deepspeed.checkpoint.disk.client_state import encode_client_state
from deepspeed.checkpoint.disk.container import Entry, write_container
from deepspeed.checkpoint.disk.folders import claim, clean, new_token, point_latest, retire, settle, swap_in
from deepspeed.checkpoint.disk.manifest import FileEntry, Manifest, TensorEntry, version_for
from deepspeed.checkpoint.disk.storage import Lock, Storage, cure_of
from deepspeed.checkpoint.save.description import Descriptions, cut_of, describe
from deepspeed.checkpoint.save.piece import Piece
from deepspeed.common.logging import get_logger
from deepspeed.errors import CheckpointError, FileIoError
from deepspeed.version import version

__all__ = ["Committed", "Content", "StartedSave", "start_checkpoint"]

_logger = get_logger(__name__)


class Held(Protocol):
    """A copy of a rank's pieces that is being made: `snapshot.Snapshot`."""

    def wait_shared(self) -> None:
        """Block until the pieces that are not private are copied."""

    def wait(self) -> None:
        """Block until all are."""

    def pieces(self) -> list[Piece]:
        """The pieces, with data of their own that no later change of the state reaches. Blocks until that is complete."""


Hold = Callable[[list[Piece]], Held | None]
"""Begins to copy; None where it cannot."""


@dataclass(frozen=True)
class Content:
    """What goes into a checkpoint.

    All of it is taken while the ranks describe, so that an error in one of them is an error on all ranks; not collective.
    """

    pieces: Iterable[Piece]
    """What this rank writes. Over all ranks the pieces cover each tensor exactly once."""

    state: Callable[[], Mapping[str, Any]]
    """What the engine keeps besides tensors: anything that `encode_client_state` takes. Asked on rank 0."""

    client_state: Callable[[], Mapping[str, Any]]
    """What the user keeps. Asked on rank 0."""

    rank_state: Callable[[], Mapping[str, Any]]
    """What differs by rank (random generators, data position)."""

    shared: Callable[[], JsonValue] = lambda: None
    """What rank 0 must know of this rank besides its pieces."""

    complete: Callable[[JsonValue, list[Any]], JsonValue] = lambda state, shared: state
    """On rank 0: the encoded state, with what all ranks shared, in rank order, put into it. May refuse the save."""


@dataclass(frozen=True)
class Committed:
    """A checkpoint that is on the disk, with the bytes of all its files."""

    folder: Path
    nbytes: int


def start_checkpoint(
    save_dir: Path,
    tag: str,
    content: Content,
    ranks: Ranks,
    *,
    hold: Hold | None = None,
    check: Callable[[], None] = lambda: None,
    save_latest: bool = True,
    storage: Storage | None = None,
    descriptions: Descriptions | None = None,
) -> StartedSave:
    """The part of a save that looks at the live state. Collective over `ranks`; `finish` of the result must follow.

    Everything that a user can do wrong is found here: states that cannot be stored, tensors that do not fit together, a
    folder that cannot be made.

    Args:
        save_dir: folder of all tags, on a file system that all ranks see; created when it lacks.
        tag: name of this checkpoint. Rank 0's counts.
        content: what is saved.
        ranks: those that save.
        hold: copies the state. Left out, or where it cannot on some rank: the state must not change until `finish` has
            returned.
        check: called on rank 0 first; what it raises, all ranks raise.
        save_latest: let `latest` name this tag afterwards.
        storage: where bytes go; None for the file system.
        descriptions: of the save before, on all ranks alike; None: there was none.

    Raises:
        CheckpointError: on all ranks alike, naming rank and file, tensor or place in the state; what was there is intact.
        ArgumentError: on all ranks alike, a tag that cannot name a folder.
    """
    said = descriptions or Descriptions()
    save = StartedSave(save_dir, tag, ranks.rank, storage or Storage(), save_latest, said)
    try:
        try:
            verdict = together(ranks, lambda: save.describe(content, hold, check), save.prepare)
        except BaseException:
            said.forget()
            raise
        said.keep()
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
        is_held: every rank holds a copy of what it writes, so the state may change before `finish`; what is private of it,
            after `wait_for_copy`.
        nbytes: of this rank's pieces.
    """

    def __init__(self, save_dir: Path, tag: str, rank: int, storage: Storage, save_latest: bool, said: Descriptions) -> None:
        self.is_held = False
        self.nbytes = 0
        self._rank = rank
        self._world_size = 0
        self.save_dir = save_dir
        self.tag = tag
        self._storage = storage
        self._save_latest = save_latest
        self._said = said
        self._token = new_token()
        self._pieces: list[Piece] = []
        self._held: Held | None = None
        self._copy_fault: FileIoError | CheckpointError | None = None
        self._state: JsonValue = None
        self._client_state: JsonValue = None
        self._rank_state: JsonValue = None
        self._complete: Callable[[JsonValue, list[Any]], JsonValue] = lambda state, shared: state
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
        described = [describe(piece) for piece in self._pieces]
        self.nbytes = sum(piece.data.nbytes for piece in self._pieces)
        self._held = None if hold is None else hold(self._pieces)
        self._complete = content.complete
        return {"pieces": self._said.own(described), "is_held": self._held is not None, "shared": content.shared()}

    def prepare(self, reports: list[JsonValue]) -> JsonValue:
        """On rank 0: see that the pieces of all ranks cover each tensor once; make the folder."""
        described = self._take_reports(reports)
        self._tensors = self._said.join([report["pieces"] for report in described])
        final = names.new_tag_folder(self.save_dir, self.tag)
        try:
            for parent in {self.save_dir, final.parent}:
                clean(parent, self._storage)
            working, self._lock = claim(final, self._storage)
            self._working = working
        except OSError as error:
            raise CheckpointError(
                f"could not make a folder for tag {self.tag!r} in {self.save_dir}: {error}. {cure_of(error)}"
            ) from error
        return {
            "working": str(working.relative_to(self.save_dir)),
            "is_held": all(report["is_held"] for report in described),
        }

    def _take_reports(self, reports: list[JsonValue]) -> Sequence[Mapping[str, JsonValue]]:
        """What `describe` gave on each rank; the state is complete afterwards."""
        described = cast("list[dict[str, JsonValue]]", reports)
        self._world_size = len(described)
        self._state = self._complete(self._state, [report["shared"] for report in described])
        return described

    def go_on(self, verdict: Mapping[str, JsonValue]) -> None:
        """Take over what rank 0 found, and wait for the copy of what the caller may write."""
        if self._held is not None:
            self._held.wait_shared()
        self._working_name = str(verdict["working"])
        self.is_held = bool(verdict["is_held"])

    def wait_for_copy(self) -> None:
        """Block until no state is read any more. In any thread."""
        held = self._held
        if held is not None:
            held.wait()

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
        self._use_copy()
        if self._copy_fault is not None:
            raise CheckpointError(
                f"checkpoint {self.tag!r} in {self.save_dir}: state of this rank could not be copied: {self._copy_fault}"
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
                f"Any earlier checkpoint is intact. {cure_of(error)}"
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
                f"saving checkpoint {self.tag!r} in {self.save_dir}: could not {doing}: {error}. {state} {cure_of(error)}"
            ) from error
        nbytes = manifest.nbytes + sum(file.nbytes for file in files.values())
        return {"folder": str(final.relative_to(self.save_dir)), "nbytes": nbytes}

    def _use_copy(self) -> None:
        """Wait for the copy. What could not be read for it is said when all ranks write, so that all raise together."""
        held = self._held
        if held is not None:
            try:
                copied = held.pieces()
                self._pieces[: len(copied)] = copied
            except (FileIoError, CheckpointError) as error:
                self._copy_fault = error
            finally:
                self._held = None  # last: `wait_for_copy` may ask at any moment

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
            version=version_for(self._tensors),
            library=version,
            saved_at=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
            world_size=self._world_size,
            files=files,
            tensors=self._tensors,
            state=self._state,
        )


def _entry(piece: Piece) -> Entry:
    """How a piece stands in its file: a whole tensor in its own shape, a fragment flat."""
    is_whole = cut_of(piece) is None and piece.data.numel() == prod(piece.shape)
    shape = piece.shape if is_whole else (piece.data.numel(),)
    return Entry(names.fragment_key(piece.name, piece.start, is_whole=is_whole), shape, piece.data)
