"""Writing one `.pt` archive that the original, and plain torch, read.

    object --- pickle ---> data.pkl       containers and numbers; the original's classes by name, out of `stand_ins`
           --- tensors -->  data/0, 1 ...  one record each, filled block by block while the file is written

A `StreamedTensor` has no elements in memory: they are asked for when its record is due, so an archive of any size needs one
block of memory. The same one at several places is one record, and one tensor when it is read (tied weights).

Does not live here: reading (`archive`, the only place that unpickles), what goes into the files (`writing.to_stages`,
`writing.to_universal`).
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2

from deepspeed.checkpoint.disk.torch_records import ALIGNMENT_NBYTES, open_record
from deepspeed.checkpoint.original.stand_ins import GLOBAL_NAMES
from deepspeed.errors import CheckpointError

__all__ = ["StreamedTensor", "save_archive"]

_PROTOCOL = 2
"""Of the pickle: what `torch.save` writes and what `weights_only` reads."""

_FORMAT_VERSION = b"3\n"
"""Of the archive: torch 1.6 and later."""

_BLOCK_NUMEL = 1 << 20
_OWN_PACKAGE = __name__.partition(".")[0]
_ORIGINAL_NAMES = {f"{record.__module__}.{record.__qualname__}": name for record, name in GLOBAL_NAMES.items()}

_STORAGES: dict[torch.dtype, Any] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}
"""The class by which an archive says what a record's elements are."""


@dataclass(frozen=True, eq=False)
class StreamedTensor:
    """A tensor whose elements are asked for while its file is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[int, Tensor], object]
    """`fill(start, out)` sets flat `out`, of `dtype` on the CPU, to elements `[start, start + len(out))`."""

    @classmethod
    def of(cls, tensor: Tensor) -> StreamedTensor:
        """The elements of a tensor that is there, as they are when the file is written."""

        def fill(start: int, out: Tensor) -> None:
            out.copy_(tensor.detach().reshape(-1)[start : start + out.numel()])

        return cls(tuple(tensor.shape), tensor.dtype, fill)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


def save_archive(obj: Any, path: Path) -> int:
    """Write a new archive, durable on return.

    Args:
        obj: containers, plain values, tensors, `StreamedTensor`s and `stand_ins`.
        path: the file, which must not exist.

    Returns:
        Bytes of the file.

    Raises:
        CheckpointError: something in `obj` has no form that the original reads; no file is left.
        OSError: the system refused.
    """
    text = io.BytesIO()
    pickler = _Pickler(text)
    pickler.dump(obj)
    content = _with_original_names(text.getvalue())
    with path.open("xb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            _write_record(archive, f"{path.stem}/data.pkl", content)
            _write_record(archive, f"{path.stem}/.format_version", b"1")
            _write_record(archive, f"{path.stem}/.storage_alignment", str(ALIGNMENT_NBYTES).encode())
            _write_record(archive, f"{path.stem}/byteorder", sys.byteorder.encode())
            for number, tensor in enumerate(pickler.tensors):
                _write_tensor(archive, f"{path.stem}/data/{number}", tensor)
            _write_record(archive, f"{path.stem}/version", _FORMAT_VERSION)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


@dataclass(frozen=True)
class _Record:
    """Stands in the pickle for the storage of tensor `number`."""

    number: int
    tensor: StreamedTensor


class _Pickler(pickle.Pickler):
    """Puts tensors aside."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, _PROTOCOL)
        self.tensors: list[StreamedTensor] = []
        """What records `data/0`, `data/1`, ... hold."""

    def persistent_id(self, obj: Any) -> Any:
        """How a storage is named: kind, class, record, device and number of elements."""
        if not isinstance(obj, _Record):
            return None
        return ("storage", _STORAGES[obj.tensor.dtype], str(obj.number), "cpu", obj.tensor.numel)

    def reducer_override(self, obj: Any) -> Any:
        """How a tensor is rebuilt, whatever its class: as a plain, contiguous one on the CPU."""
        if isinstance(obj, Tensor):
            obj = StreamedTensor.of(obj)
        if not isinstance(obj, StreamedTensor):
            return NotImplemented
        if obj.dtype not in _STORAGES:
            raise CheckpointError(
                f"a tensor of {obj.dtype} cannot be written to the original's archives, which know "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _STORAGES)}. Convert it first."
            )
        record = _Record(len(self.tensors), obj)
        self.tensors.append(obj)
        return _rebuild_tensor_v2, (record, 0, obj.shape, _strides(obj.shape), False, OrderedDict())


def _with_original_names(text: bytes) -> bytes:
    """A pickle with the stand-ins' names replaced by those of the original's classes.

    Instructions of this protocol hold no offsets, so a name may change its length.

    Raises:
        CheckpointError: it names something else of this library.
    """
    parts: list[bytes] = []
    done: int | None = 0
    for (opcode, name, start), (_, _, end) in pairwise(pickletools.genops(text)):
        if opcode.name == "GLOBAL":
            parts += [text[done:start], _global(_original_name(str(name).replace(" ", ".")))]
            done = end
    return b"".join([*parts, text[done:]])


def _original_name(dotted: str) -> str:
    if dotted.partition(".")[0] == _OWN_PACKAGE and dotted not in _ORIGINAL_NAMES:
        raise CheckpointError(
            f"{dotted} is something of this library that the original does not have, so it cannot be written to one of its "
            "files. Put plain values in its place."
        )
    return _ORIGINAL_NAMES.get(dotted, dotted)


def _global(dotted: str) -> bytes:
    module, _, attribute = dotted.rpartition(".")
    return pickle.GLOBAL + f"{module}\n{attribute}\n".encode()


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def _write_record(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    with open_record(archive, name, len(data)) as record:
        record.write(data)


def _write_tensor(archive: zipfile.ZipFile, name: str, tensor: StreamedTensor) -> None:
    block = torch.empty(min(tensor.numel, _BLOCK_NUMEL), dtype=tensor.dtype)
    with open_record(archive, name, tensor.numel * tensor.dtype.itemsize) as record:
        for start in range(0, tensor.numel, _BLOCK_NUMEL):
            out = block[: min(_BLOCK_NUMEL, tensor.numel - start)]
            tensor.fill(start, out)
            record.write(out.view(torch.uint8).numpy().data)
