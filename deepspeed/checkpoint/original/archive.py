"""Reading one `.pt` archive of the original: the only place of this library that unpickles.

    file --- a zip? ---> names in its pickle --- all plain? ---> torch.load(weights_only=True, mmap) ---> stand-ins out

torch's `weights_only` unpickler builds tensors and containers and calls nothing else; classes of the original and of NumPy
become `stand_ins`. Any other class is refused by name before anything is built. Tensors are views of the mapped file, so an
archive costs memory only where it is read.

Does not live here: what the objects mean (`reading.stages`, `reading.universal`), writing (`pickles`).
"""

from __future__ import annotations

import argparse
import threading
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.original.stand_ins import READABLE, NumpyRecord
from deepspeed.common.wording import some
from deepspeed.errors import CheckpointDamagedError, CheckpointError

__all__ = ["RefusedClassError", "check_archive", "load_archive"]

_ZIP_MAGIC = b"PK\x03\x04"
_BLOCK_NBYTES = 1 << 20
_SHOWN = 8
_TORCH_PREFIX = "WeightsUnpickler error:"
_one_at_a_time = threading.Lock()
"""torch keeps the allowed classes in one table for the whole process."""


class RefusedClassError(CheckpointError):
    """An archive names classes or functions that are not plain data; the text names them and the cure."""

    def __init__(self, path: Path, names: list[str]) -> None:
        super().__init__(
            f"{path} names {some(names, _SHOWN)}. Only plain data is read, because building other objects runs their code; "
            f"nothing was built. If you trust the file and what it names, allow it with "
            f"torch.serialization.add_safe_globals([{names[0].rpartition('.')[2]}]), for each name, before loading; or load "
            "the file where it was written and save that part as numbers, strings, lists, dicts and tensors."
        )
        self.names = names


def load_archive(path: Path, mmap: bool = True) -> Any:
    """What a `.pt` archive holds, tensors on the CPU. Runs no code of the archive.

    Args:
        path: the file.
        mmap: leave the elements in the file until they are read; the file must then stay as it is. Changing such a tensor
            does not change the file.

    Raises:
        CheckpointDamagedError: the file is missing, cut short or not an archive.
        RefusedClassError: it names something that is not plain data.
    """
    _check_kind(path)
    with _one_at_a_time, torch.serialization.safe_globals(READABLE):
        try:
            refused = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
            if refused:
                raise RefusedClassError(path, refused)
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except (RefusedClassError, MemoryError):
            raise
        except Exception as error:  # a damaged pickle can end in any exception; all mean that the file cannot be read
            raise CheckpointDamagedError(
                f"{path} cannot be read: {_reason(error)} Bring the file again from where it was copied."
            ) from error
    return _without_records(found, {})


def check_archive(path: Path) -> str | None:
    """What is wrong with an archive, by the checksums in it; None when nothing is. Unpickles nothing."""
    try:
        _check_kind(path)
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if not any(member.filename.endswith("/data.pkl") for member in members):
                return f"{path.name} is not an archive of torch: it has no data.pkl"
            if any(member.CRC for member in members):  # torch can leave checksums out: then all are 0
                for member in members:
                    with archive.open(member) as content:
                        while content.read(_BLOCK_NBYTES):
                            pass
    except CheckpointDamagedError as error:
        return str(error)
    except (OSError, EOFError, ValueError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        return f"{path.name} is damaged ({_reason(error)})"
    return None


def _check_kind(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_ZIP_MAGIC))
    except OSError as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}.") from error
    if magic != _ZIP_MAGIC:
        raise CheckpointDamagedError(
            f"{path} is {'empty' if not magic else 'not a zip archive of torch'}: it is damaged, or was written by torch "
            "before 1.6. Bring it again from where it was copied, or load and save it there with a newer torch."
        )


def _without_records(found: Any, seen: dict[int, Any]) -> Any:
    """`found` with NumPy's stand-ins replaced by what they stand for; containers are changed in place."""
    if isinstance(found, NumpyRecord):
        return found.value()
    if id(found) in seen:
        return seen[id(found)]
    if isinstance(found, dict | list | set | argparse.Namespace):
        seen[id(found)] = found
    if isinstance(found, dict):
        items = [(_without_records(key, seen), _without_records(value, seen)) for key, value in found.items()]
        found.clear()
        for key, value in items:  # not update(): that of a Counter counts
            found[key] = value
    elif isinstance(found, list):
        found[:] = [_without_records(value, seen) for value in found]
    elif isinstance(found, argparse.Namespace):
        _without_records(vars(found), seen)
    elif type(found) in (tuple, set, frozenset):
        return type(found)(_without_records(value, seen) for value in found)
    return found


def _reason(error: Exception) -> str:
    """What went wrong, in a line; torch's advice to unpickle everything is left out."""
    text = str(error).rpartition(_TORCH_PREFIX)[2].strip() or type(error).__name__
    line = text.splitlines()[0]
    return line if line.endswith(".") else f"{line}."
