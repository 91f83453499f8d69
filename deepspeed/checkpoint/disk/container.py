"""The safetensors container: writing it tensor by tensor, and reading ranges of it straight into place.

Written here rather than by the safetensors package because that one needs all tensors at once and gives no hash on the way;
the files are ordinary safetensors files (the tests open them with the package). See docs/adr/0003-checkpoint-format.md.

[Note: order] Tensors lie in order of falling element size, so each is aligned to its own element without any padding,
which the format does not allow between tensors.

Does not live here: the header (`safetensors_header`); which tensors, under which keys (`save.writer`, `manifest`). Called by
all that reads or writes such files (`reader`, `save`, `export`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from deepspeed.checkpoint.disk.safetensors_header import Field, check_dtype, make_header, read_into, read_places
from deepspeed.common.deferred import DeferredTensor, loaded
from deepspeed.errors import CheckpointError

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
    data: Tensor | DeferredTensor


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
            f"{what} has dtype {dtype}, which a checkpoint file cannot hold. It holds {known}. Convert the tensor: "
            "complex128 and complex32 with torch.view_as_real, a quantized one with .int_repr(), others with "
            ".view(torch.uint8). A buffer that need not be saved may be registered with persistent=False."
        )
    return _DTYPE_NAMES[dtype]


def dtype_of(name: str, what: str) -> torch.dtype:
    """Inverse of `dtype_name`.

    Raises:
        CheckpointError: this version does not know the name.
    """
    return _DTYPES[check_dtype(name, what)]


def write_container(sink: Sink, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
    """Write a whole safetensors file into `sink`; at most one tensor is copied to the host at a time.

    Args:
        sink: takes the bytes in file order.
        entries: tensors on any device, of any strides; keys are unique.
        metadata: text to put into the header.
    """
    ordered = sorted(entries, key=lambda entry: -entry.data.element_size())  # [Note: order]; sorted() keeps the given order
    fields = [Field(e.key, dtype_name(e.data.dtype, f"tensor {e.key!r}"), e.shape) for e in ordered]
    sink.write(memoryview(make_header(fields, metadata)))
    for entry in ordered:
        data = bytes_of(loaded(entry.data))
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
    places = read_places(path)
    located = {
        key: Located(dtype_of(place.dtype, f"tensor {key!r}"), place.numel, place.start_nbytes)
        for key, place in places.tensors.items()
    }
    return Header(located, places.metadata)


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
    read_into(path, located.start_nbytes + start * located.dtype.itemsize, out.detach().view(torch.uint8).numpy().data)
