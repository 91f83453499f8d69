"""A conversion's output: written beside its place, and put there in one step when it is whole.

    parent/.<name>.converting-<token>/    being written; nobody reads it
         | commit: rename, or exchange with the folder that stands at the place, which is then removed
         v
    parent/<name>/

What a killed conversion left is removed by the next one into the same place; a live one holds a lock. Unlike a save
(`disk.folders`), nothing of the folder before is carried over: it is a copy, and stale files in it would be read.

Does not live here: what is written. Called by the converters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepspeed.checkpoint.disk.folders import new_token, swap_in
from deepspeed.checkpoint.disk.storage import Storage, cure_of
from deepspeed.errors import ArgumentError, CheckpointError, DeepSpeedError

__all__ = ["point_to", "written_aside"]


@contextmanager
def written_aside(output: Path, storage: Storage, *, keep_unfinished: bool = False) -> Iterator[Path]:
    """A new folder to write into. Leaving the context commits it as `output`; an exception removes it.

    Args:
        output: where the whole result shall stand; what stands there is replaced.
        storage: the file system.
        keep_unfinished: after an exception, leave what was written.

    Raises:
        ArgumentError: `output` is a file.
        CheckpointError: another live conversion works on the same output, or the system refused; `output` is what it was.
    """
    try:
        with _written_aside(output, storage, keep_unfinished) as working:
            yield working
    except DeepSpeedError:  # some are an OSError too
        raise
    except OSError as error:
        raise CheckpointError(
            f"could not write {output}: {error}. What was there before is intact. {cure_of(error)}"
        ) from error


@contextmanager
def _written_aside(output: Path, storage: Storage, keep_unfinished: bool) -> Iterator[Path]:
    if output.exists() and not output.is_dir():
        raise ArgumentError(f"the output folder {output} is a file. Remove it, or give another folder.")
    output.parent.mkdir(parents=True, exist_ok=True)
    _clean(output, storage)
    token = new_token()
    working = output.with_name(f".{output.name}.converting-{token}")
    storage.make_folder(working)
    lock = storage.lock(working)
    try:
        yield working
        old = swap_in(working, output, token, storage)
        storage.sync_folder(output.parent)
        if old is not None:
            storage.remove(old)
    except BaseException:
        if working.exists() and not keep_unfinished:
            storage.remove(working)
        raise
    finally:
        if lock is not None:
            lock.release()


def point_to(pointer: Path, name: str, storage: Storage) -> None:
    """Let the text file `pointer` hold `name`, in one step."""
    aside = pointer.with_name(f".{pointer.name}.converting-{new_token()}")
    storage.write_file(aside, name.encode())
    storage.rename(aside, pointer)
    storage.sync_folder(pointer.parent)


def _clean(output: Path, storage: Storage) -> None:
    prefix = f".{output.name}.converting-"
    for left in sorted(path for path in output.parent.iterdir() if path.name.startswith(prefix)):
        lock = storage.lock(left)
        if lock is None:
            raise CheckpointError(
                f"another conversion is writing {output} (its working folder is {left}). Wait for it, or end it, or give "
                "another output folder."
            )
        try:
            storage.remove(left)
        finally:
            lock.release()
