"""The weights of a checkpoint of any layout as a stream of bytes, through a `CheckpointSource`.

Does not live here: our own layout, which needs no torch for this (`weights_source`, which calls this module).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from deepspeed.checkpoint.agreement import Alone
from deepspeed.checkpoint.disk.container import bytes_of, dtype_name
from deepspeed.checkpoint.export.weights_source import BLOCK_NBYTES
from deepspeed.checkpoint.export.weights_table import Weight
from deepspeed.checkpoint.opening import open_folder
from deepspeed.checkpoint.source import CheckpointSource

__all__ = ["TensorWeights", "open_tensor_weights"]


class TensorWeights:
    """Weights of a source."""

    written_by: str | None = None

    def __init__(self, source: CheckpointSource) -> None:
        self.folder = source.folder
        self.state = cast("Mapping[str, Any]", source.state)
        self.tensors: Mapping[str, tuple[str, tuple[int, ...]]] = {
            name: (dtype_name(source.dtype(name), f"tensor {name!r}"), source.shape(name)) for name in source.names()
        }
        self._source = source

    def blocks(self, weight: Weight) -> Iterator[memoryview]:
        """All bytes of a weight, in blocks that are read anew."""
        count = BLOCK_NBYTES // self._source.dtype(weight.stored).itemsize
        for start in range(0, weight.numel, count):
            yield bytes_of(self._source.read(weight.stored, start, min(count, weight.numel - start)))


def open_tensor_weights(folder: Path) -> TensorWeights:
    """Open the folder of one tag and check its files.

    Raises:
        CheckpointError, CheckpointDamagedError, CheckpointNotFoundError: see `opening.open_checkpoint`.
    """
    source = open_folder(folder, folder.name, Alone())
    source.check_own_share()
    return TensorWeights(source)
