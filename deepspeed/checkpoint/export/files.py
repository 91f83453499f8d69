"""The weights of a checkpoint as files for other programs: `pytorch_model.bin` or `model.safetensors`, whole or in shards.

    checkpoint  --> weights_table   the complete state dict, by name and size
                --> shard_plan      which weight into which file; nothing has been read yet
                --> blocks of bytes --> casting --> weights_file, written aside      one block in memory at a time
    all files are on the disk       --> renamed into place, the index last

A kill before the renames leaves the output folder as it was, apart from a folder with a leading dot that the next export
removes. One file is replaced in one step. Of several, the old index goes first and the new one comes last: a kill between
the renames leaves a folder without an index, never one whose index names a mixture.

Does not live here: the state dict as tensors (`full_state`), the commands (`consolidate`), which call this. Knows no ranks:
one process exports.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from deepspeed.checkpoint.disk.folders import clean, new_token, working_folder
from deepspeed.checkpoint.disk.safetensors_header import Field
from deepspeed.checkpoint.disk.storage import Storage, cure_of
from deepspeed.checkpoint.export.casting import CASTABLE, cast_bytes
from deepspeed.checkpoint.export.shard_plan import Item, ShardPlan, parse_nbytes, plan_shards
from deepspeed.checkpoint.export.weights_file import is_safetensors, weights_file
from deepspeed.checkpoint.export.weights_source import WeightsSource
from deepspeed.checkpoint.export.weights_table import Weight, list_weights
from deepspeed.common.logging import get_logger
from deepspeed.errors import ArgumentError, CheckpointError

__all__ = ["DTYPES", "SAFETENSORS_FILE", "TORCH_FILE", "export_weights", "parse_dtype", "planned_nbytes"]

TORCH_FILE = "pytorch_model.bin"
SAFETENSORS_FILE = "model.safetensors"

DTYPES = {
    "fp32": "F32",
    "float32": "F32",
    "fp16": "F16",
    "float16": "F16",
    "bf16": "BF16",
    "bfloat16": "BF16",
}
"""Names of element types on the command line -> their spelling in files."""

_WORKING = "exported-weights"

_logger = get_logger(__name__)


def parse_dtype(name: str) -> str:
    """Element type of a name such as `bf16`, in the spelling of safetensors.

    Raises:
        ArgumentError: no such type.
    """
    if name not in DTYPES:
        raise ArgumentError(f"dtype={name!r} is no type that weights can be exported in. Give one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def export_weights(
    source: WeightsSource,
    output_dir: str | os.PathLike[str],
    *,
    dtype: str | None = "F32",
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    exclude_frozen: bool = False,
    progress: Callable[[str, int], None] = lambda name, nbytes: None,
    storage: Storage | None = None,
) -> list[Path]:
    """Write all weights of a checkpoint; return the files, the index last. Memory: a few blocks, whatever the model.

    Args:
        source: the checkpoint.
        output_dir: created if it lacks. Weights of an earlier export in the same format are replaced, all other files stay;
            a warning names weights in the other format.
        dtype: type of all floating-point values, in the spelling of safetensors; None keeps each as it is stored.
        max_shard_size: limit per file, as `shard_plan.parse_nbytes` reads it; None for one file.
        safe_serialization: safetensors instead of torch files. Tied weights are then written under each name.
        exclude_frozen: leave out parameters that did not require gradients.
        progress: called with (file, bytes written to it since the last call).
        storage: where bytes go; None for the file system.

    Raises:
        ArgumentError: an unusable size, or a file stands at `output_dir`.
        CheckpointError: the system refused; what was in `output_dir` is intact.
        CheckpointDamagedError: a file of the checkpoint changed while it was read.
    """
    weights = list_weights(source.tensors, source.state, exclude_frozen=exclude_frozen)
    _warn_of_missing(source, exclude_frozen)
    kind = SAFETENSORS_FILE if safe_serialization else TORCH_FILE
    items = _items(weights, dtype, safe_serialization)
    total_nbytes = sum(item.nbytes for item in items)
    limit_nbytes = max(total_nbytes, 1) if max_shard_size is None else parse_nbytes(max_shard_size)
    plan = plan_shards(items, limit_nbytes, kind)
    job = _Export(source, {weight.name: weight for weight in weights}, dtype, kind, plan, progress)
    return job.run(Path(output_dir), storage or Storage())


def planned_nbytes(weights: Sequence[Weight], dtype: str | None, *, safe_serialization: bool = False) -> int:
    """Bytes of tensors that an export of `weights` writes; arguments as of `export_weights`."""
    return sum(item.nbytes for item in _items(weights, dtype, safe_serialization) if item.shares_with is None)


class _Export:
    """One export under way."""

    def __init__(
        self,
        source: WeightsSource,
        weights: dict[str, Weight],
        dtype: str | None,
        kind: str,
        plan: ShardPlan,
        progress: Callable[[str, int], None],
    ) -> None:
        self._source = source
        self._weights = weights
        self._dtype = dtype
        self._kind = kind
        self._other = TORCH_FILE if kind == SAFETENSORS_FILE else SAFETENSORS_FILE
        self._plan = plan
        self._progress = progress

    def run(self, output_dir: Path, storage: Storage) -> list[Path]:
        """Write all files aside, then bring them into place."""
        if output_dir.exists() and not output_dir.is_dir():
            raise ArgumentError(f"{output_dir} is a file. Give the folder that the weights are to be written into.")
        working = working_folder(output_dir / _WORKING, new_token())
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            clean(output_dir, storage)
            storage.make_folder(working)
            lock = storage.lock(working)
            try:
                for file, names in self._plan.files.items():
                    self._write(working / file, names, storage)
                return self._bring_into_place(working, output_dir, storage)
            finally:
                storage.remove(working)
                if lock is not None:
                    lock.release()
        except OSError as error:
            raise CheckpointError(
                f"could not write the weights into {output_dir}: {error}. Weights that were there are intact. "
                f"{cure_of(error)}"
            ) from error

    def _write(self, path: Path, names: Sequence[str], storage: Storage) -> None:
        """Write one file, durably."""
        aliases: dict[str, str] = {}
        if not is_safetensors(path.name):
            aliases = {n: owner for n in names if (owner := self._weights[n].owner) is not None}
        fields = [_field(self._weights[name], self._dtype) for name in names if name not in aliases]
        types = {field.key: field.dtype for field in fields}
        with storage.create(path) as sink:
            with weights_file(path.name, sink, fields, aliases) as file:
                for name in file.order:
                    file.put(name, self._blocks(path.name, self._weights[name], types[name]))
            sink.finish()

    def _blocks(self, file: str, weight: Weight, dtype: str) -> Iterator[memoryview]:
        for stored in self._source.blocks(weight):
            block = cast_bytes(stored, weight.dtype, dtype)
            yield block
            self._progress(file, len(block))

    def _bring_into_place(self, working: Path, output_dir: Path, storage: Storage) -> list[Path]:
        """Rename the finished files. Shards of an earlier export of the same kind go, so that none are read by mistake."""
        files = list(self._plan.files)
        if self._plan.index_file is not None:
            storage.write_file(working / self._plan.index_file, self._plan.index().encode())
            files.append(self._plan.index_file)
        earlier = {path.name for path in output_dir.iterdir() if path.is_file() and _is_of_kind(path.name, self._kind)}
        if self._plan.index_file in earlier:
            storage.remove(output_dir / self._plan.index_file)
            earlier.remove(self._plan.index_file)
        for name in files:
            storage.rename(working / name, output_dir / name)
        for name in earlier - {*files}:
            storage.remove(output_dir / name)
        storage.sync_folder(output_dir)
        others = sorted(path.name for path in output_dir.iterdir() if path.is_file() and _is_of_kind(path.name, self._other))
        if others:
            _logger.warning(
                "%s also holds weights of an earlier export in the other format (%s). Some programs, such as transformers, "
                "read safetensors before torch files: remove the older ones, or export them again too.",
                output_dir,
                ", ".join(others),
            )
        return [output_dir / name for name in files]


def _is_of_kind(name: str, kind: str) -> bool:
    """Whether a file of that name is the whole, a shard or the index of weights whose whole is named `kind`."""
    stem, _, suffix = kind.rpartition(".")
    return re.fullmatch(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.{suffix}(\.index\.json)?", name) is not None


def _items(weights: Sequence[Weight], dtype: str | None, safe_serialization: bool) -> list[Item]:
    """What is to be placed; tied weights share bytes except in safetensors files."""
    return [Item(w.name, _field(w, dtype).nbytes, None if safe_serialization else w.owner) for w in weights]


def _field(weight: Weight, dtype: str | None) -> Field:
    """How a weight stands in its file."""
    is_cast = dtype is not None and weight.dtype in CASTABLE
    return Field(weight.name, dtype if is_cast and dtype is not None else weight.dtype, weight.shape)


def _warn_of_missing(source: WeightsSource, exclude_frozen: bool) -> None:
    frozen = source.state["frozen_parameters"]
    if frozen and not exclude_frozen and not source.state["has_frozen_parameters"]:
        _logger.warning(
            "%s was saved with exclude_frozen_parameters=True: the %s frozen parameters (%s, ...) are not in it and will be "
            "missing from the weights. Take them from where the model was loaded from.",
            source.folder,
            len(frozen),
            frozen[0],
        )
