"""The weights of a checkpoint as a stream of bytes.

    our layout       OwnWeights        the files' bytes, block by block; loads no torch
    other layouts    tensor_weights    the same through a `CheckpointSource`

Does not live here: tensors (`full_state`), files that are written (`files`). Called by those
and by `consolidate`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from deepspeed.checkpoint.disk.file_check import check_files
from deepspeed.checkpoint.disk.gathering import gather_rows
from deepspeed.checkpoint.disk.layouts import Layout, layout_of
from deepspeed.checkpoint.disk.manifest import Manifest, Part, parts_of
from deepspeed.checkpoint.disk.names import LATEST_FILE, MANIFEST_FILE
from deepspeed.checkpoint.disk.safetensors_header import ITEM_NBYTES, Places, check_dtype, read_into, read_places
from deepspeed.checkpoint.disk.tags import find_tag, hint_for, read_latest
from deepspeed.checkpoint.export.weights_table import Weight
from deepspeed.errors import CheckpointDamagedError, CheckpointNotFoundError
from deepspeed.sharding.cut import Cut
from deepspeed.sharding.recut import rows_of, uncut

__all__ = ["BLOCK_NBYTES", "NoLatestError", "OwnWeights", "WeightsSource", "find_checkpoint", "open_weights"]

BLOCK_NBYTES = 1 << 20
"""Bytes that are read at a time: few enough to stay in the processor's cache on their way to the file."""

_GATHERED_NBYTES = 8 << 20
"""Of a tensor that is stored in parts: each block comes from several files."""

_CHECKING_THREADS = 4


class NoLatestError(CheckpointNotFoundError, ValueError):
    """No tag was given, and no file `latest` says which one is meant."""


class WeightsSource(Protocol):
    """A checkpoint, open to read its weights from; checked for damage."""

    folder: Path

    written_by: str | None
    """Version of the library that wrote it, where the layout says so."""

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Every tensor's name -> (element type in the spelling of safetensors, shape)."""

    state: Mapping[str, Any]
    """At least the plain entries of `source.EngineState`."""

    def blocks(self, weight: Weight) -> Iterator[memoryview]:
        """All bytes of a weight as it is stored, whole elements per block; a block is valid until the next is asked for."""


def find_checkpoint(load_dir: str | os.PathLike[str], tag: str | None = None) -> Path:
    """Folder of the checkpoint that is meant.

    Raises:
        NoLatestError: no tag and no `latest`.
        CheckpointNotFoundError: no such folder; the text lists the tags there are.
    """
    folder = Path(load_dir)
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"{folder} is no folder. Give the one that holds the tags and {LATEST_FILE!r}.")
    wanted = str(tag) if tag is not None else read_latest(folder)
    if wanted is None:
        raise NoLatestError(f"{folder} has no file {LATEST_FILE!r}, so a tag is needed. {hint_for(folder)}")
    return find_tag(folder, wanted, by_latest=tag is None)


def open_weights(load_dir: str | os.PathLike[str], tag: str | None = None) -> WeightsSource:
    """Open a checkpoint of any layout and check its files.

    Raises:
        NoLatestError: no tag and no `latest`.
        CheckpointNotFoundError: no such folder.
        CheckpointDamagedError: a file is missing, cut short or changed; the text names each.
    """
    folder = find_checkpoint(load_dir, tag)
    if layout_of(folder) is Layout.OURS:
        return OwnWeights(folder)
    # By name, because it loads torch, which takes longer than all that is to be done for our layout.
    module = importlib.import_module("deepspeed.checkpoint.export.tensor_weights")
    return cast("WeightsSource", module.open_tensor_weights(folder))


class OwnWeights:
    """A checkpoint of our format."""

    def __init__(self, folder: Path) -> None:
        path = folder / MANIFEST_FILE
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise CheckpointDamagedError(f"{path} cannot be read: {error}.") from error
        self.folder = folder
        self._manifest = Manifest.parse(raw, str(path))
        check_files(folder, self._manifest.files, _CHECKING_THREADS)
        self.written_by: str | None = self._manifest.library
        self.state = cast("Mapping[str, Any]", self._manifest.state)
        self.tensors: Mapping[str, tuple[str, tuple[int, ...]]] = {
            name: (check_dtype(entry.dtype, f"tensor {name!r}"), tuple(entry.shape))
            for name, entry in self._manifest.tensors.items()
        }
        self._places: dict[str, Places] = {}
        self._buffer = memoryview(bytearray(BLOCK_NBYTES))
        self._gathered = memoryview(b"")

    def blocks(self, weight: Weight) -> Iterator[memoryview]:
        """All bytes of a weight, in blocks that share one buffer."""
        entry = self._manifest.tensors[weight.stored]
        if entry.cut is not None:
            yield from self._gathered_blocks(weight, entry.cut.cut_of(entry.shape))
            return
        for part in parts_of(entry.fragments, 0, weight.numel):
            start_nbytes, stop_nbytes = self._find(part, weight.dtype)
            for offset_nbytes in range(start_nbytes, stop_nbytes, BLOCK_NBYTES):
                block = self._buffer[: min(BLOCK_NBYTES, stop_nbytes - offset_nbytes)]
                read_into(self.folder / part.file, offset_nbytes, block)
                yield block

    def _gathered_blocks(self, weight: Weight, cut: Cut) -> Iterator[memoryview]:
        """Those of a weight that is stored in parts: of whole rows, where they are short."""
        item_nbytes, row_numel = ITEM_NBYTES[weight.dtype], cut.shape[cut.dim] * cut.inner
        count = _GATHERED_NBYTES // item_nbytes
        count -= count % row_numel if row_numel <= count else 0
        if not self._gathered:
            self._gathered = memoryview(bytearray(_GATHERED_NBYTES))
        whole = uncut(cut.shape, cut.dim)

        def read(start: int, into: memoryview) -> None:
            for part in parts_of(self._manifest.tensors[weight.stored].fragments, start, len(into) // item_nbytes):
                place = into[part.at * item_nbytes : (part.at + part.length) * item_nbytes]
                read_into(self.folder / part.file, self._find(part, weight.dtype)[0], place)

        for start in range(0, weight.numel, count):
            numel = min(count, weight.numel - start)
            block = self._gathered[: numel * item_nbytes]
            gather_rows(rows_of(cut, whole, 0, start, numel), item_nbytes, read, block)
            yield block

    def _find(self, part: Part, dtype: str) -> tuple[int, int]:
        """Where the bytes of a part begin and end in its file."""
        if part.file not in self._places:
            self._places[part.file] = read_places(self.folder / part.file)
        place = self._places[part.file].tensors.get(part.key)
        if place is None or place.dtype != dtype or place.numel < part.start + part.length:
            raise CheckpointDamagedError(
                f"{self.folder / part.file} does not hold {part.length} elements of {part.key!r} as {dtype} from element "
                f"{part.start}, which {MANIFEST_FILE} promises: {'no such key' if place is None else place}."
            )
        item_nbytes = ITEM_NBYTES[dtype]
        start_nbytes = place.start_nbytes + part.start * item_nbytes
        return start_nbytes, start_nbytes + part.length * item_nbytes
