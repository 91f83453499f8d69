"""One state dict in one file, without pickle: what `checkpoint_engine.save(state_dict, path)` writes.

    path    a safetensors file: tensors under `state/<number>`, everything else as JSON in the field `state` of its header

Not a checkpoint: no folder, no ranks, no commit over several files. Reading also takes the files of `torch.save`, through
torch's own restricted unpickler. Does not live here: checkpoints (`writer`, `reader`). Called by `engines`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import JsonValue
from torch import Tensor

from deepspeed.checkpoint.disk import strict_json
from deepspeed.checkpoint.disk.client_state import decode_client_state, encode_client_state
from deepspeed.checkpoint.disk.container import Entry, read_header, read_range, write_container
from deepspeed.checkpoint.disk.storage import Storage
from deepspeed.checkpoint.original.archive import load_archive
from deepspeed.common.pytree import map_tensors
from deepspeed.errors import ArgumentError, CheckpointDamagedError, CheckpointNotFoundError

__all__ = ["read_state", "write_state"]

_FIELD = "state"
_ZIP = b"PK\x03\x04"


def write_state(path: str | os.PathLike[str], state: Mapping[str, Any], storage: Storage) -> None:
    """Write a state dict; a kill leaves the old file or the new one. Not collective.

    Raises:
        UnstorableStateError: a value has no plain form; the text says where it is.
        OSError: the system refused.
    """
    final = Path(path)
    encoded, tensors = encode_client_state(dict(state), "state_dict")
    entries = [Entry(_key(number), tuple(tensor.shape), tensor) for number, tensor in enumerate(tensors)]
    aside = final.with_name(f".{final.name}.writing-{secrets.token_hex(8)}")
    try:
        content = strict_json.dumps([encoded, [list(tensor.shape) for tensor in tensors]])
        with storage.create(aside) as file:
            write_container(file, entries, {_FIELD: content})
            file.finish()
        storage.rename(aside, final)
    except BaseException:
        if aside.exists():
            storage.remove(aside)
        raise
    storage.sync_folder(final.parent)


def read_state(path: str | os.PathLike[str], map_location: str | torch.device | None = None) -> dict[str, Any]:
    """Read what `write_state` wrote, or a `torch.save` file of tensors and plain values.

    Args:
        path: the file.
        map_location: device of the tensors; None is the CPU.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointDamagedError: it is cut short, or neither kind of file, or holds objects that only a pickle could make.
        ArgumentError: `map_location` is no device.
    """
    file = Path(path)
    if not isinstance(map_location, str | torch.device | None):
        raise ArgumentError(f"map_location={map_location!r} must be a device, its name, or None.")
    if not file.is_file():
        raise CheckpointNotFoundError(f"{file} is no file. Give the path that was given to save().")
    with file.open("rb") as opened:
        is_archive = opened.read(len(_ZIP)) == _ZIP
    if is_archive:
        found = load_archive(file, mmap=False)
        moved = found if map_location is None else map_tensors(lambda each: each.to(map_location), found)
        return cast("dict[str, Any]", moved)
    header = read_header(file)
    if _FIELD not in header.metadata:
        raise CheckpointDamagedError(f"{file} is a safetensors file without the field {_FIELD!r}: save() did not write it.")
    encoded, shapes = cast("tuple[JsonValue, list[list[int]]]", strict_json.loads(header.metadata[_FIELD]))

    def tensor(number: int) -> Tensor:
        located = header.tensors[_key(number)]
        flat = torch.empty(located.numel, dtype=located.dtype)
        read_range(file, located, 0, flat)
        return flat.view(shapes[number]).to(map_location or "cpu")

    return cast("dict[str, Any]", decode_client_state(encoded, tensor))


def _key(number: int) -> str:
    return f"state/{number}"
