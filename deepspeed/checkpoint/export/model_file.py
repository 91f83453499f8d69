"""A live model's weights as one file, written while its tensors come in, one after the other.

Does not live here: where the tensors come from (`engine.whole_model`, which calls this); checkpoints as files
(`files`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed.checkpoint.disk.container import bytes_of, dtype_name
from deepspeed.checkpoint.disk.folders import clean, new_token, working_folder
from deepspeed.checkpoint.disk.safetensors_header import Field
from deepspeed.checkpoint.disk.storage import Storage, cure_of
from deepspeed.checkpoint.export.weights_file import is_safetensors, weights_file
from deepspeed.errors import CheckpointError

__all__ = ["ModelEntry", "write_model_file"]

_BLOCK_NBYTES = 1 << 20


class ModelEntry(NamedTuple):
    """One tensor of a model, under all its names."""

    names: list[str]
    dtype: torch.dtype
    shape: tuple[int, ...]


def write_model_file(
    path: Path,
    entries: Sequence[ModelEntry],
    values: Iterable[tuple[str, Tensor]],
    *,
    others: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
) -> None:
    """Write a file that plain PyTorch loads; a safetensors file where the name ends in `.safetensors`.

    It is written aside and renamed: a kill or an error leaves the old file or the new one. Memory: one tensor.

    Args:
        path: the file; its folder is created where it lacks.
        entries: what will come, ordered as `values` and, for a safetensors file, by falling element size.
        values: (first name, tensor on any device), for every entry.
        others: entries of the state dict that are no tensors; a safetensors file has no place for them.
        metadata: `_metadata` of the state dict.
        storage: where bytes go; None for the file system.

    Raises:
        CheckpointError: the system refused, or a safetensors file cannot hold something; the old file is intact.
    """
    storage = storage or Storage()
    aside = working_folder(path, new_token())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        clean(path.parent, storage)
        try:
            _write(aside, path.name, entries, values, others or {}, metadata, storage)
            storage.rename(aside, path)
        finally:
            if aside.exists():
                storage.remove(aside)
        storage.sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"could not write the model's weights into {path}: {error}. A file that was there is intact. {cure_of(error)}"
        ) from error


def _write(
    aside: Path,
    name: str,
    entries: Sequence[ModelEntry],
    values: Iterable[tuple[str, Tensor]],
    others: Mapping[str, Any],
    metadata: Mapping[str, Any] | None,
    storage: Storage,
) -> None:
    if others and is_safetensors(name):
        raise CheckpointError(
            f"{name!r} cannot hold {', '.join(map(repr, sorted(others)))} of the model's state dict, which are no tensors. "
            "Save a .bin file, or leave them out of the state dict."
        )
    has_copies = is_safetensors(name)  # such a file has no aliases
    fields = [
        Field(field_name, dtype_name(entry.dtype, f"tensor {field_name!r}"), entry.shape)
        for entry in entries
        for field_name in (entry.names if has_copies else entry.names[:1])
    ]
    aliases = {} if has_copies else {alias: entry.names[0] for entry in entries for alias in entry.names[1:]}
    names = {entry.names[0]: entry.names if has_copies else entry.names[:1] for entry in entries}
    with storage.create(aside) as sink:
        lock = storage.lock(aside)
        try:
            with weights_file(name, sink, fields, aliases, metadata, others) as file:
                for first, tensor in values:
                    for each in names[first]:
                        file.put(each, _blocks(tensor))
            sink.finish()
        finally:
            if lock is not None:
                lock.release()


def _blocks(tensor: Tensor) -> Iterator[memoryview]:
    data = bytes_of(tensor)
    for start in range(0, len(data), _BLOCK_NBYTES):
        yield data[start : start + _BLOCK_NBYTES]
