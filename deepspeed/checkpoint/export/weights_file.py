"""Files of weights that other programs read, written as a stream of bytes: at no time is a whole tensor needed in memory.

    TorchFile         `torch.load(path, weights_only=True)`: a zip archive, data.pkl and one record per storage
    SafetensorsFile   header, then the tensors in header order

Tied weights are one storage with two names in a TorchFile; safetensors has no such thing, there they are two copies.

[Note: written by hand] `torch.save` needs every tensor of the file in memory at once, and torch itself, whose import takes
longer than a small export. What is written here is what `torch.save` writes: stored records that begin at multiples of 64
bytes, their checksums behind them, and a pickle of the calls that build the tensors. The tests read it with torch.

Does not live here: which weights (`weights_table`), how they come from the checkpoint (`weights_source`), names of files
(`shard_plan`). Called by `files`, and by `model_file`.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Protocol, cast

from typing_extensions import Self

from deepspeed.checkpoint.disk.safetensors_header import ITEM_NBYTES, Field, make_header
from deepspeed.checkpoint.disk.torch_records import ALIGNMENT_NBYTES, open_record

__all__ = ["SafetensorsFile", "Sink", "TorchFile", "WeightsFile", "weights_file"]

_ARCHIVE = "archive"

_STORAGES = {
    "F64": "DoubleStorage",
    "F32": "FloatStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "C64": "ComplexFloatStorage",
    "I64": "LongStorage",
    "I32": "IntStorage",
    "I16": "ShortStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
    "BOOL": "BoolStorage",
}
_UNTYPED = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
}
"""Types without a storage class of their own -> name of the torch.dtype."""


class Sink(Protocol):
    """Where bytes go."""

    def write(self, data: memoryview) -> None:
        """Append all of `data`."""


class WeightsFile(Protocol):
    """A file that is being written."""

    order: list[str]
    """Keys, in the order in which `put` wants them."""

    def put(self, key: str, blocks: Iterable[memoryview]) -> None:
        """Write all bytes of one tensor."""

    def __enter__(self) -> Self:
        """The file itself."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Write what comes after the last tensor, unless an exception is under way. The sink stays open."""


class SafetensorsFile:
    """A safetensors file.

    [Note: order] Tensors lie in order of falling element size, so each is aligned to its own element without padding.
    """

    def __init__(self, sink: Sink, fields: Sequence[Field]) -> None:
        ordered = sorted(fields, key=lambda field: -ITEM_NBYTES[field.dtype])
        self.order = [field.key for field in ordered]
        self._sink = sink
        self._left = list(reversed(ordered))
        self._sink.write(memoryview(make_header(ordered, {"format": "pt"})))

    def put(self, key: str, blocks: Iterable[memoryview]) -> None:
        """Write all bytes of the next tensor of `order`."""
        field = self._left.pop()
        assert field.key == key  # callers go through `order`
        nbytes = 0
        for block in blocks:
            self._sink.write(block)
            nbytes += len(block)
        assert nbytes == field.nbytes  # the shape came from where the bytes came from

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert kind is not None or not self._left  # every tensor was put


class TorchFile:
    """A file for `torch.load`: a dict of tensors, in the order of `fields`, then the aliases."""

    def __init__(
        self,
        sink: Sink,
        fields: Sequence[Field],
        aliases: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        others: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin the file.

        Args:
            sink: takes the bytes.
            fields: the tensors that are put.
            aliases: further names -> the key whose storage they share.
            metadata: `_metadata` of a module's state dict; plain values. The file then holds an OrderedDict.
            others: entries that are no tensors.
        """
        self.order = [field.key for field in fields]
        self._fields = {field.key: field for field in fields}
        self._numbers = {key: number for number, key in enumerate(self.order)}
        self._zip = zipfile.ZipFile(cast("IO[bytes]", _Pipe(sink)), "w")
        try:
            self._record("data.pkl", self._pickle(aliases or {}, metadata, others or {}))
            self._record(".format_version", b"1")
            self._record(".storage_alignment", str(ALIGNMENT_NBYTES).encode())
            self._record("byteorder", b"little")
        except BaseException:
            self._abandon()
            raise

    def put(self, key: str, blocks: Iterable[memoryview]) -> None:
        """Write all bytes of one tensor; the order of the calls is free."""
        nbytes = self._fields[key].nbytes
        with self._open(f"data/{self._numbers[key]}", nbytes) as record:
            for block in blocks:
                record.write(block)
                nbytes -= len(block)
        assert nbytes == 0  # the shape came from where the bytes came from

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._abandon()
            return
        self._record("version", b"3\n")
        self._zip.close()

    def _abandon(self) -> None:
        """Write nothing more: a zip archive would write its directory when it is collected, into a sink closed by then."""
        self._zip.fp = None

    def _record(self, name: str, data: bytes) -> None:
        with self._open(name, len(data)) as record:
            record.write(data)

    def _open(self, name: str, nbytes: int) -> IO[bytes]:
        return open_record(self._zip, f"{_ARCHIVE}/{name}", nbytes)

    def _pickle(self, aliases: Mapping[str, str], metadata: Mapping[str, Any] | None, others: Mapping[str, Any]) -> bytes:
        """The program that builds the dict; every plain value in it is what Python's own pickler makes of it."""
        names = dict(zip(self.order, self.order, strict=True)) | dict(aliases)
        items = b"".join(_plain(name) + self._tensor(key) for name, key in names.items())
        items += b"".join(_plain(name) + _plain(value) for name, value in others.items())
        empty = b"}" if metadata is None else b"ccollections\nOrderedDict\n)R"
        attributes = b"" if metadata is None else _plain({"_metadata": metadata}) + b"b"
        return b"\x80\x02" + empty + b"(" + items + b"u" + attributes + b"."

    def _tensor(self, key: str) -> bytes:
        """Call `_rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks)`; v3 takes the dtype as well."""
        field = self._fields[key]
        is_typed = field.dtype in _STORAGES
        strides = [1]
        for extent in field.shape[:0:-1]:
            strides.insert(0, strides[0] * max(extent, 1))
        count = field.nbytes // ITEM_NBYTES[field.dtype] if is_typed else field.nbytes
        kind = f"ctorch\n{_STORAGES[field.dtype]}\n" if is_typed else "ctorch.storage\nUntypedStorage\n"
        place = _plain("storage") + kind.encode() + _plain(str(self._numbers[key])) + _plain("cpu") + _plain(count)
        layout = _plain(0) + _plain(field.shape) + _plain(tuple(strides[: len(field.shape)]))
        hooks = _plain(False) + b"ccollections\nOrderedDict\n)R"
        dtype = b"" if is_typed else f"ctorch\n{_UNTYPED[field.dtype]}\n".encode()
        function = f"ctorch._utils\n_rebuild_tensor_v{2 if is_typed else 3}\n".encode()
        return function + b"((" + place + b"tQ" + layout + hooks + dtype + b"tR"


class _Pipe:
    """A sink as `zipfile` writes to it; without `tell`, so it is not asked to go back."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, data: bytes | memoryview) -> int:
        self._sink.write(memoryview(data))
        return len(data)

    def flush(self) -> None:
        """`zipfile` asks for it; whoever made the sink flushes it."""


def weights_file(
    name: str,
    sink: Sink,
    fields: Sequence[Field],
    aliases: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    others: Mapping[str, Any] | None = None,
) -> WeightsFile:
    """Begin a file of the kind that the ending of `name` says: `.safetensors`, or torch's for any other.

    `fields` are what is put. A safetensors file knows no aliases and no others: there, aliases must be fields.
    """
    if is_safetensors(name):
        assert not aliases  # callers make fields of them
        assert not others  # callers refuse them
        return SafetensorsFile(sink, fields)
    return TorchFile(sink, fields, aliases, metadata, others)


def is_safetensors(name: str) -> bool:
    """Whether a file of that name is to be a safetensors file."""
    return name.endswith(".safetensors")


def _plain(value: object) -> bytes:
    """Instructions that push a plain value."""
    return pickle.dumps(value, protocol=2)[2:-1]  # without the protocol number before and the full stop after it
