"""A checkpoint from folders to another folder: every file hashed on the way, committed there as a save is.

    manifest (as it is) + the files that it names, from anywhere ---> .<tag>.writing-<token>/ ---> <tag>/ ---> latest

Lives here: copying our format whole. Does not live here: when (`tiers`), other layouts (`original`). Called by
`tiers` and by `deepspeed-checkpoint merge`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import xxhash

from deepspeed.checkpoint.disk import names
from deepspeed.checkpoint.disk.folders import clean, new_token, point_latest, settle, swap_in, working_folder
from deepspeed.checkpoint.disk.manifest import FileEntry, Manifest
from deepspeed.checkpoint.disk.storage import Storage, cure_of
from deepspeed.errors import CheckpointDamagedError, CheckpointError

__all__ = ["commit_copy", "copy_checkpoint"]

_BLOCK_NBYTES = 1 << 20


def copy_checkpoint(
    folder: Path,
    target_dir: Path,
    tag: str,
    storage: Storage,
    *,
    save_latest: bool,
    progress: Callable[[str], None] = lambda file: None,
) -> Path:
    """Copy one checkpoint of our format; files of the user in its folder stay where they are.

    Args:
        folder: the checkpoint's folder.
        target_dir: folder of all tags to copy into; created when it lacks.
        tag: its name there. A checkpoint of that name is replaced in one step.
        storage: writes.
        save_latest: let `latest` there name it.
        progress: told each file before it is copied.

    Returns:
        The new folder.

    Raises:
        CheckpointDamagedError: a file differs from the manifest; the text names it. Nothing was changed.
        CheckpointError: the system refused; what was there is intact.
    """
    path = folder / names.MANIFEST_FILE
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}.") from error
    files = {file: folder / file for file in Manifest.parse(raw, str(path)).files}
    return commit_copy(raw, files, target_dir, tag, storage, save_latest=save_latest, progress=progress)


def commit_copy(
    manifest: bytes,
    files: Mapping[str, Path],
    target_dir: Path,
    tag: str,
    storage: Storage,
    *,
    save_latest: bool,
    progress: Callable[[str], None] = lambda file: None,
) -> Path:
    """Put a checkpoint together out of its manifest and the places of its files; see `copy_checkpoint`.

    Args:
        manifest: bytes of `manifest.json`.
        files: every file that the manifest names -> where it lies now.
        target_dir: as for `copy_checkpoint`.
        tag: as for `copy_checkpoint`.
        storage: as for `copy_checkpoint`.
        save_latest: as for `copy_checkpoint`.
        progress: as for `copy_checkpoint`.
    """
    entries = Manifest.parse(manifest, names.MANIFEST_FILE).files
    final, token = names.new_tag_folder(target_dir, tag), new_token()
    working = working_folder(final, token)
    lock = None
    try:
        clean(target_dir, storage)
        storage.make_folder(working)
        lock = storage.lock(working)
        for file, entry in entries.items():
            progress(file)
            _copy_file(files[file], working / file, entry, storage)
        storage.write_file(working / names.MANIFEST_FILE, manifest)
        old = swap_in(working, final, token, storage)
        settle(old, final, storage)
        if save_latest:
            point_latest(target_dir, tag, token, storage)
    except OSError as error:
        raise CheckpointError(
            f"could not copy checkpoint {tag!r} to {target_dir}: {error}. What was there is intact. {cure_of(error)}"
        ) from error
    finally:
        if lock is not None:
            lock.release()
        if working.is_dir():
            clean(target_dir, storage)
    return final


def _copy_file(source: Path, target: Path, entry: FileEntry, storage: Storage) -> None:
    buffer = memoryview(bytearray(_BLOCK_NBYTES))
    whole = None if entry.blocks else xxhash.xxh3_128()  # versions 1 and 2
    try:
        opened = source.open("rb", buffering=0)
    except OSError as error:
        raise CheckpointDamagedError(f"{source} cannot be read: {error}. Nothing was changed.") from error
    with opened as reading, storage.create(target) as writing:
        while count := reading.readinto(buffer):
            writing.write(buffer[:count])
            if whole is not None:
                whole.update(buffer[:count])
        written = writing.finish()
        is_same = written.blocks == entry.blocks if whole is None else entry.xxh3_128 in (None, whole.hexdigest())
        if written.nbytes != entry.nbytes or not is_same:
            raise CheckpointDamagedError(f"{source} differs from what was written (its hash does not match). Not copied.")
