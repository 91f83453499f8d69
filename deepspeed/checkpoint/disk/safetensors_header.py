"""The header of a safetensors file, by names of element types: no torch, so commands that only move bytes start at once.

    | 8 bytes: N | N bytes: JSON header, padded with spaces to 8 | tensors, back to back, in header order |

Source: safetensors format, https://huggingface.co/docs/safetensors, "Format".

Does not live here: tensors (`container`, which is called with them) and files of ours (`save.writer`, `reader`). Called by
`container`, and by what exports weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple, cast

from pydantic import JsonValue

from deepspeed.checkpoint.disk import strict_json
from deepspeed.checkpoint.disk.storage import announce_run
from deepspeed.errors import CheckpointDamagedError, CheckpointError

__all__ = ["ITEM_NBYTES", "Field", "Place", "Places", "check_dtype", "make_header", "read_into", "read_places"]

ITEM_NBYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2": 1,
    "F8_E5M2FNUZ": 1,
    "C64": 8,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of one element, for every element type that this library reads and writes."""

_MAX_HEADER_NBYTES = 100_000_000
"""The limit of the safetensors package; a longer header means a damaged length."""

_RUN_NBYTES = 1 << 20
"""From this length on a range is read as a long run of its file."""


class Field(NamedTuple):
    """A tensor to describe: what a file holds under `key`."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * ITEM_NBYTES[self.dtype]


class Place(NamedTuple):
    """Where a tensor's bytes lie: `numel` elements from `start_nbytes` after the beginning of the file."""

    dtype: str
    numel: int
    start_nbytes: int


@dataclass(frozen=True)
class Places:
    """What a file says it holds."""

    tensors: Mapping[str, Place]
    metadata: Mapping[str, str]


def check_dtype(name: str, what: str) -> str:
    """Return `name`.

    Raises:
        CheckpointError: this version does not know the element type; `what` says whose it is.
    """
    if name not in ITEM_NBYTES:
        raise CheckpointError(
            f"{what} has dtype {name!r}, which this version cannot read; it reads {', '.join(ITEM_NBYTES)}."
        )
    return name


def make_header(fields: Iterable[Field], metadata: Mapping[str, str]) -> bytes:
    """All bytes that come before the first tensor, for tensors that lie in the order of `fields`."""
    described: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset_nbytes = 0
    for field in fields:
        end_nbytes = offset_nbytes + field.nbytes
        described[field.key] = {
            "dtype": field.dtype,
            "shape": list(field.shape),
            "data_offsets": [offset_nbytes, end_nbytes],
        }
        offset_nbytes = end_nbytes
    header = strict_json.dumps(cast("dict[str, JsonValue]", described)).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def read_places(path: Path) -> Places:
    """Read and check the header of a safetensors file.

    Raises:
        CheckpointDamagedError: not such a file, or cut short; the text names it.
        CheckpointError: an element type that this version does not know.
    """
    try:
        with path.open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            header_nbytes = int.from_bytes(file.read(8), "little")
            if not 2 <= header_nbytes <= min(nbytes - 8, _MAX_HEADER_NBYTES):
                raise ValueError(f"its header of {header_nbytes} bytes does not fit into a file of {nbytes} bytes")
            fields = strict_json.loads(file.read(header_nbytes))
        return _parse(fields, 8 + header_nbytes, nbytes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read as a safetensors file: {error}.") from error


def _parse(fields: JsonValue, data_start_nbytes: int, file_nbytes: int) -> Places:
    """Turn header fields into places, checking that each lies inside the file."""
    described = cast("dict[str, dict[str, list[int]]]", fields)
    metadata = {str(key): str(text) for key, text in described.pop("__metadata__", {}).items()}
    tensors: dict[str, Place] = {}
    for key, field in described.items():
        dtype = check_dtype(str(field["dtype"]), f"tensor {key!r}")
        start, end = (data_start_nbytes + int(offset) for offset in field["data_offsets"])
        numel = prod(field["shape"])
        if not data_start_nbytes <= start <= end <= file_nbytes or end - start != numel * ITEM_NBYTES[dtype]:
            raise ValueError(
                f"tensor {key!r} at bytes {start} to {end} does not fit its shape or the file of {file_nbytes} bytes"
            )
        tensors[key] = Place(dtype, numel, start)
    return Places(tensors, metadata)


def read_into(path: Path, offset_nbytes: int, into: memoryview) -> None:
    """Fill `into` with the file's bytes from `offset_nbytes` on.

    Raises:
        CheckpointDamagedError: the file ends too early or cannot be read; the text names it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if len(into) >= _RUN_NBYTES:
                announce_run(fd)
            _fill(fd, offset_nbytes, into)
        finally:
            os.close(fd)
    except (OSError, EOFError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}.") from error


def _fill(fd: int, offset_nbytes: int, into: memoryview) -> None:
    while into:
        count = os.preadv(fd, [into], offset_nbytes)
        if not count:
            raise EOFError(f"the file ends {len(into)} bytes too early")
        into, offset_nbytes = into[count:], offset_nbytes + count
