"""How a tag's folder comes to be: written aside, committed by one rename, whatever stood there before.

    save_dir/.<tag>.writing-<token>/     being written; nobody reads it
         | commit: rename            (no folder of that tag yet)
         | commit: exchange          (there is one: the two swap in one step; the old one is then removed)
         v
    save_dir/<tag>/

A process killed at any point leaves either the old folder or the new one under the tag, and perhaps a folder with a leading
dot, which the next save removes. Files in a tag's folder that this format does not write are the user's: they are carried
over.

[Note: two renames] Where the system cannot exchange (some network file systems), the old folder is first renamed to
`.<tag>.replaced-<token>`. A kill just then leaves the tag without a folder; `find_folder` reads the set-aside one, and the
next save puts it back.

[Note: other jobs] Several jobs may save into one folder. The lock on a working folder keeps the cleaning of the others away
from it. What has no lock yet, or never, because it exists for a moment only (a folder just made, the new `latest`), may be
taken for a left-over; it is then made again.

Does not live here: what a folder holds (`save.writer`, `reader`). Called by all that writes aside (`save`, `export`,
`original.writing`), by `tags` to find a folder, and by the tools to tell left-overs.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from deepspeed.checkpoint.disk.names import LATEST_FILE, MANIFEST_FILE, is_own_file
from deepspeed.checkpoint.disk.storage import Lock, Storage
from deepspeed.common.logging import get_logger
from deepspeed.errors import CheckpointError

__all__ = [
    "Aside",
    "claim",
    "clean",
    "find_folder",
    "new_token",
    "point_latest",
    "retire",
    "set_aside",
    "settle",
    "swap_in",
    "working_folder",
]

_TRIES = 10
_ASIDE = re.compile(r"\.(?P<name>.+)\.(?P<kind>writing|replaced)-[0-9a-f]{16}")

_logger = get_logger(__name__)


class Aside(NamedTuple):
    """A folder with a leading dot: its path, the tag's folder that it belongs to, and `writing` or `replaced`."""

    path: Path
    final: Path
    kind: str


def new_token() -> str:
    """A name part that no other save has."""
    return secrets.token_hex(8)


def working_folder(final: Path, token: str) -> Path:
    """Where the folder `final` is written before it is committed."""
    return final.with_name(f".{final.name}.writing-{token}")


def claim(final: Path, storage: Storage) -> tuple[Path, Lock]:
    """Make a folder to write `final` in, and lock it, so that other jobs leave it alone. See [Note: other jobs].

    Raises:
        OSError: the system refused.
    """
    for _ in range(_TRIES):
        working = working_folder(final, new_token())
        storage.make_folder(working)
        try:
            lock = storage.lock(working)
        except FileNotFoundError:
            continue
        if lock is not None and storage.is_folder(working):
            return working, lock
        if lock is not None:
            lock.release()
    raise OSError(errno.EBUSY, "another job removed each folder that was made", str(final.parent))


def clean(parent: Path, storage: Storage) -> None:
    """Remove what killed saves left in `parent`, and put back what they had set aside; live saves are left alone."""
    for aside in set_aside(parent):
        try:
            _clean_one(aside, storage)
        except FileNotFoundError:
            continue  # its job has committed it, or another has cleaned it up
        except OSError as error:
            _logger.warning("could not clean up %s, left by an interrupted save: %s. Remove it by hand.", aside.path, error)


def swap_in(working: Path, final: Path, token: str, storage: Storage) -> Path | None:
    """Make the finished folder `working` the folder `final`: the commit. Return where the old one now is, if there was one.

    Raises:
        CheckpointError: a file stands at `final`.
        OSError: the system refused; `final` is what it was.
    """
    storage.sync_folder(working)
    if not final.exists():
        try:
            storage.rename(working, final)
            return None
        except OSError:
            if not final.is_dir():
                raise
            # another job has just made it: it is replaced like any other
    if not final.is_dir():
        raise CheckpointError(
            f"{final} is a file, so the checkpoint cannot be a folder of that name. Remove it or choose another tag."
        )
    if storage.exchange(working, final):
        return working
    old = final.with_name(f".{final.name}.replaced-{token}")
    lock = storage.lock(final)  # so that no other job puts it back meanwhile
    try:
        storage.rename(final, old)  # [Note: two renames]
        try:
            storage.rename(working, final)
        except OSError:
            storage.rename(old, final)
            raise
    finally:
        if lock is not None:
            lock.release()
    return old


def settle(old: Path | None, final: Path, storage: Storage) -> None:
    """Make the commit durable, then remove the old folder.

    Raises:
        OSError: the system refused to make it durable.
    """
    storage.sync_folder(final.parent)
    if old is not None:
        try:
            retire(old, final, storage)
        except OSError as error:
            _logger.warning("the new checkpoint %s is whole, but the old one could not be removed: %s.", final, error)


def retire(old: Path, final: Path, storage: Storage) -> None:
    """Remove a folder that is no checkpoint, or no longer one, after carrying the user's own files over to `final`.

    Raises:
        OSError: the system refused; what is left is cleaned up by a later save.
    """
    if old.is_dir() and not old.is_symlink() and final.is_dir():
        with contextlib.suppress(FileNotFoundError):  # another job carries or removes at the same time
            for entry in sorted(old.iterdir()):
                if not is_own_file(entry.name) and not (final / entry.name).exists():
                    _logger.info("carrying %s over to the new checkpoint: it is not one of its files.", entry)
                    storage.rename(entry, final / entry.name)
    storage.remove(old)


def point_latest(save_dir: Path, tag: str, token: str, storage: Storage) -> None:
    """Let the file `latest` name `tag`, in one step.

    Raises:
        OSError: the system refused; `latest` is what it was.
    """
    aside = save_dir / f".{LATEST_FILE}.writing-{token}"
    for attempt in range(_TRIES):
        storage.write_file(aside, tag.encode())
        try:
            storage.rename(aside, save_dir / LATEST_FILE)
            break
        except FileNotFoundError:  # [Note: other jobs]
            if attempt == _TRIES - 1:
                raise
    storage.sync_folder(save_dir)


def find_folder(final: Path) -> Path | None:
    """The folder to read for a tag: itself, or the one that an interrupted save had set aside, or None."""
    if final.is_dir():
        return final
    found = (aside.path for aside in set_aside(final.parent) if aside.final == final and aside.kind == "replaced")
    return next((path for path in found if (path / MANIFEST_FILE).is_file()), None)


def set_aside(parent: Path) -> Iterator[Aside]:
    """Folders with a leading dot that saves have made in `parent`, and a `latest` that was never renamed."""
    if not parent.is_dir():
        return
    for path in sorted(parent.iterdir()):
        match = _ASIDE.fullmatch(path.name)
        if match:
            yield Aside(path, path.with_name(match["name"]), match["kind"])


def _clean_one(aside: Aside, storage: Storage) -> None:
    lock = storage.lock(aside.path)
    if lock is None:
        return
    try:
        if aside.kind == "replaced" and not aside.final.exists():
            storage.rename(aside.path, aside.final)
        else:
            retire(aside.path, aside.final, storage)
    finally:
        lock.release()
