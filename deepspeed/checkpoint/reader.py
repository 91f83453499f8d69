"""Reading our format: parse the manifest, check files, then read exactly the ranges that are asked for.

    .check_own_share()             hash this rank's share of the files
    .read(name, start, length)     bytes from the files straight into the tensor; not collective

Does not live here: what becomes of the tensors (the engine), which folder it is (`opening`). Called by `opening`,
`save.node_load` and the tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from deepspeed.checkpoint.agreement import Ranks
from deepspeed.checkpoint.disk import names, strict_json
from deepspeed.checkpoint.disk.client_state import decode_client_state
from deepspeed.checkpoint.disk.container import Header, dtype_of, read_header
from deepspeed.checkpoint.disk.file_check import check_runs, share_blocks
from deepspeed.checkpoint.disk.gathering import gather_rows
from deepspeed.checkpoint.disk.manifest import Manifest, Part, TensorEntry, parts_of
from deepspeed.checkpoint.disk.range_check import prepare_out, unknown_tensor
from deepspeed.checkpoint.disk.safetensors_header import read_into
from deepspeed.checkpoint.parts import fill
from deepspeed.checkpoint.source import EngineState
from deepspeed.errors import CheckpointDamagedError
from deepspeed.sharding.cut import Cut
from deepspeed.sharding.recut import rows_of, uncut

__all__ = ["CheckpointReader"]


class CheckpointReader:
    """A checkpoint of our format, as a `CheckpointSource`. It holds no open file."""

    def __init__(self, folder: Path, tag: str, ranks: Ranks) -> None:
        self.folder = folder
        self.tag = tag
        self.manifest = Manifest.parse(_read_file(folder / names.MANIFEST_FILE), str(folder / names.MANIFEST_FILE))
        self._ranks = ranks
        self._headers: dict[str, tuple[Path, Header]] = {}
        self._cuts: dict[str, Cut] = {
            name: entry.cut.cut_of(entry.shape) for name, entry in self.manifest.tensors.items() if entry.cut is not None
        }

    @cached_property
    def state(self) -> EngineState:
        """What the engine stored besides tensors."""
        return cast("EngineState", decode_client_state(self.manifest.state, self._tensor_reader(names.state_tensor)))

    def with_members(self, members: Sequence[Sequence[str]]) -> CheckpointReader:
        """Itself: entries are stored by name."""
        return self

    def client_state(self) -> dict[str, Any]:
        """What the user stored, read anew at each call; tensors are on the CPU."""
        path = self.folder / names.CLIENT_STATE_FILE
        try:
            encoded = strict_json.loads(_read_file(path))
        except ValueError as error:
            raise CheckpointDamagedError(f"{path} is not the JSON that was written: {error}.") from error
        return cast("dict[str, Any]", decode_client_state(encoded, self._tensor_reader(names.client_state_tensor)))

    def rank_state(self, rank: int) -> dict[str, Any]:
        """What `rank` of the writing job stored for itself; empty when it stored nothing, or there was no such rank."""
        file = names.shard_file(rank)
        text = self._opened(file)[1].metadata.get(names.RANK_STATE_FIELD) if file in self.manifest.files else None
        if text is None:
            return {}
        tensor = self._tensor_reader(lambda number: names.rank_state_tensor(rank, number))
        return cast("dict[str, Any]", decode_client_state(strict_json.loads(text), tensor))

    def names(self, prefix: str = "") -> list[str]:
        """Names of all tensors that start with `prefix`, sorted."""
        return [name for name in self.manifest.tensors if name.startswith(prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of a tensor."""
        return tuple(self._tensor(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a tensor on the disk."""
        return dtype_of(self._tensor(name).dtype, f"tensor {name!r}")

    def read(self, name: str, start: int = 0, length: int | None = None, out: Tensor | None = None) -> Tensor:
        """Read elements `[start, start + length)` of the flattened tensor, and no other bytes where it is not cut.

        Args:
            name: the tensor's global name.
            start: first element.
            length: elements; None for all up to the end, or as many as `out` has.
            out: flat tensor of `length` elements to fill, on any device and of any dtype (elements are converted); filled
                without a copy where it is contiguous, on the CPU and of the stored dtype. None makes a new tensor.

        Returns:
            `out`, or the new flat tensor on the CPU.

        Raises:
            ArgumentError: the range or `out` does not fit the tensor, or there is no tensor of that name.
            CheckpointDamagedError: a file ends too early or does not hold what the manifest says.
        """
        dtype, cut = self.dtype(name), self.cut(name)
        out = prepare_out(name, self._tensor(name).numel, dtype, start, length, out)
        if cut is None:
            return self.read_stored(name, start, out)
        whole = uncut(cut.shape, cut.dim)

        def read(at: int, into: memoryview) -> None:
            rows = rows_of(cut, whole, 0, start + at, len(into) // dtype.itemsize)
            gather_rows(rows, dtype.itemsize, lambda first, block: self._read_bytes(name, first, block), into)

        fill(out, dtype, read)
        return out

    def cut(self, name: str) -> Cut | None:
        """How the tensor is stored in parts; None: in its own order."""
        return self._cuts.get(name)

    def read_stored(self, name: str, start: int, out: Tensor) -> Tensor:
        """As `read`, where elements count in stored order."""
        dtype = self.dtype(name)
        prepare_out(name, self._tensor(name).stored_numel, dtype, start, None, out)
        fill(out, dtype, lambda at, into: self._read_bytes(name, start + at, into))
        return out

    def check_own_share(self) -> None:
        """Compare this rank's share of the files with the manifest.

        Raises:
            CheckpointDamagedError: on this rank only; `opening.open_checkpoint` raises on all together.
        """
        files = self.manifest.files
        check_runs(self.folder, files, share_blocks(files, self._ranks.world_size)[self._ranks.rank])

    def _read_bytes(self, name: str, start: int, into: memoryview) -> None:
        """Fill bytes with the elements of stored order from `start` on."""
        dtype = self.dtype(name)
        for part in parts_of(self._tensor(name).fragments, start, len(into) // dtype.itemsize):
            path, start_nbytes = self._place_of(part, dtype)
            place = into[part.at * dtype.itemsize : (part.at + part.length) * dtype.itemsize]
            read_into(path, start_nbytes, place)

    def _place_of(self, part: Part, dtype: torch.dtype) -> tuple[Path, int]:
        """The file of a part, and the byte where it begins there."""
        path, header = self._opened(part.file)
        located = header.tensors.get(part.key)
        if located is None or located.dtype != dtype or located.numel < part.start + part.length:
            raise CheckpointDamagedError(
                f"{path} does not hold {part.length} elements of {part.key!r} as {dtype} from element "
                f"{part.start}, which {names.MANIFEST_FILE} promises: {'no such key' if located is None else located}."
            )
        return path, located.start_nbytes + part.start * dtype.itemsize

    def _tensor_reader(self, tensor_name: Any) -> Any:
        """How a decoder gets the tensor of a number, in its own shape."""
        return lambda number: self.read(tensor_name(number)).view(self.shape(tensor_name(number)))

    def _tensor(self, name: str) -> TensorEntry:
        if name not in self.manifest.tensors:
            raise unknown_tensor(self.folder, name, self.manifest.tensors)
        return self.manifest.tensors[name]

    def _opened(self, file: str) -> tuple[Path, Header]:
        """Where a file lies, and what it says it holds."""
        if file not in self._headers:
            path = self.folder / file
            self._headers[file] = path, read_header(path)
        return self._headers[file]


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}.") from error
