"""The safetensors container: writing it tensor by tensor, and reading ranges of it straight into place.

    | 8 bytes: N | N bytes: JSON header, padded with spaces to 8 | tensors, back to back, in header order |

Written here rather than by the safetensors package because that one needs all tensors at once and gives no hash on the way;
the files are ordinary safetensors files (the tests open them with the package). See docs/adr/0003-checkpoint-format.md.

[Note: order] Tensors lie in order of falling element size, so each is aligned to its own element without any padding,
which the format does not allow between tensors.

Source: safetensors format, https://huggingface.co/docs/safetensors, "Format".

Does not live here: which tensors, under which keys (`writer`, `manifest`). Called by `writer` and `reader`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol, cast

import torch
from pydantic import JsonValue
from torch import Tensor

from deepspeed.checkpoint import strict_json
from deepspeed.errors import CheckpointDamagedError, CheckpointError

__all__ = [
    "Entry",
    "Header",
    "Located",
    "Sink",
    "bytes_of",
    "dtype_name",
    "dtype_of",
    "read_header",
    "read_range",
    "write_container",
]

_COPY_NBYTES = 1 << 20
"""Bytes handed to the sink at a time: small enough that a hash and the write that follows share the processor's cache."""

_MAX_HEADER_NBYTES = 100_000_000
"""The limit of the safetensors package; a longer header means a damaged length."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Sink(Protocol):
    """Where bytes go."""

    def write(self, data: memoryview) -> None:
        """Append all of `data`."""


@dataclass(frozen=True)
class Entry:
    """One tensor to write under `key`, with the shape that a reader of the file sees (`prod(shape) == data.numel()`)."""

    key: str
    shape: tuple[int, ...]
    data: Tensor


@dataclass(frozen=True)
class Located:
    """Where one tensor's bytes lie: `[start_nbytes, start_nbytes + numel * itemsize)` from the beginning of the file."""

    dtype: torch.dtype
    numel: int
    start_nbytes: int


@dataclass(frozen=True)
class Header:
    """What a file says it holds."""

    tensors: Mapping[str, Located]
    metadata: Mapping[str, str]


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """Name of `dtype` in the format.

    Raises:
        CheckpointError: the format has no such dtype; `what` says whose it is.
    """
    if dtype not in _DTYPE_NAMES:
        known = ", ".join(str(known).removeprefix("torch.") for known in _DTYPE_NAMES)
        raise CheckpointError(
            f"{what} has dtype {dtype}, which a checkpoint file cannot hold. It holds {known}. Convert the tensor, "
            f"for example complex128 with torch.view_as_real, a quantized tensor with .int_repr()."
        )
    return _DTYPE_NAMES[dtype]


def dtype_of(name: str, what: str) -> torch.dtype:
    """Inverse of `dtype_name`.

    Raises:
        CheckpointError: this version does not know the name.
    """
    if name not in _DTYPES:
        raise CheckpointError(f"{what} has dtype {name!r}, which this version cannot read; it reads {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def write_container(sink: Sink, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
    """Write a whole safetensors file into `sink`; at most one tensor is copied to the host at a time.

    Args:
        sink: takes the bytes in file order.
        entries: tensors on any device, of any strides; keys are unique.
        metadata: text to put into the header.
    """
    ordered = sorted(entries, key=lambda entry: -entry.data.element_size())  # [Note: order]; sorted() keeps the given order
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset_nbytes = 0
    for entry in ordered:
        end_nbytes = offset_nbytes + entry.data.numel() * entry.data.element_size()
        fields[entry.key] = {
            "dtype": dtype_name(entry.data.dtype, f"tensor {entry.key!r}"),
            "shape": list(entry.shape),
            "data_offsets": [offset_nbytes, end_nbytes],
        }
        offset_nbytes = end_nbytes
    header = strict_json.dumps(cast("dict[str, JsonValue]", fields)).encode()
    header += b" " * (-len(header) % 8)
    sink.write(memoryview(len(header).to_bytes(8, "little") + header))
    for entry in ordered:
        data = bytes_of(entry.data)
        for start in range(0, len(data), _COPY_NBYTES):
            sink.write(data[start : start + _COPY_NBYTES])


def bytes_of(tensor: Tensor) -> memoryview:
    """The elements of a tensor as bytes in host memory: a view where it is contiguous there, else a copy."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1).contiguous()
    return flat.view(torch.uint8).numpy().data


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        CheckpointDamagedError: not such a file, or cut short; the text names it.
    """
    try:
        with path.open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            header_nbytes = int.from_bytes(file.read(8), "little")
            if not 2 <= header_nbytes <= min(nbytes - 8, _MAX_HEADER_NBYTES):
                raise ValueError(f"its header of {header_nbytes} bytes does not fit into a file of {nbytes} bytes")
            fields = strict_json.loads(file.read(header_nbytes))
        return _parse_header(fields, 8 + header_nbytes, nbytes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read as a safetensors file: {error}.") from error


def _parse_header(fields: JsonValue, data_start_nbytes: int, file_nbytes: int) -> Header:
    """Turn header fields into places, checking that each lies inside the file."""
    described = cast("dict[str, dict[str, list[int]]]", fields)
    metadata = {str(key): str(text) for key, text in described.pop("__metadata__", {}).items()}
    tensors: dict[str, Located] = {}
    for key, field in described.items():
        dtype = dtype_of(str(field["dtype"]), f"tensor {key!r}")
        start, end = (data_start_nbytes + int(offset) for offset in field["data_offsets"])
        numel = prod(field["shape"])
        if not data_start_nbytes <= start <= end <= file_nbytes or end - start != numel * dtype.itemsize:
            raise ValueError(
                f"tensor {key!r} at bytes {start} to {end} does not fit its shape or the file of {file_nbytes} bytes"
            )
        tensors[key] = Located(dtype, numel, start)
    return Header(tensors, metadata)


def read_range(path: Path, located: Located, start: int, out: Tensor) -> None:
    """Read elements `[start, start + out.numel())` of a located tensor into `out`, and nothing else of the file.

    Args:
        path: the file.
        located: the tensor, from the file's header.
        start: first element.
        out: flat contiguous host tensor of the same dtype.

    Raises:
        CheckpointDamagedError: the file ends too early or cannot be read; the text names it.
    """
    into = out.detach().view(torch.uint8).numpy().data
    offset_nbytes = located.start_nbytes + start * located.dtype.itemsize
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset_nbytes)
            while into:
                count = file.readinto(into)
                if not count:
                    raise EOFError(f"the file ends {len(into)} bytes too early")
                into = into[count:]
    except (OSError, EOFError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}.") from error
