"""The seam behind saving: `engine.checkpoint_engine`, in the shape that clients of the original know.

    config checkpoint.writer, async_save, datastates_ckpt --> plan_of: how saves go on        --> background.Saver
                                                          --> checkpoint_engine_of: a class   --> its `storage`: bytes

Checkpoints are not state dicts in files, so an engine of this kind does not see them pass by; what it decides is where bytes
go (`storage`, asked at each save). To plug in another place or way of writing, subclass `Storage`, give it to a
`CheckpointEngine` and assign that to `engine.checkpoint_engine`. Its `save` and `load` are for a client's own state dicts.

Does not live here: the format (`writer`), the thread (`background`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from deepspeed.checkpoint.disk.manifest import BLOCK_NBYTES, FileEntry
from deepspeed.checkpoint.disk.storage import HashedFile, Lock, Storage, WriteOptions
from deepspeed.checkpoint.save.background import SavePlan
from deepspeed.checkpoint.save.state_file import read_state, write_state
from deepspeed.config.checkpoint import CheckpointConfig, DataStatesConfig, WriterConfig

__all__ = [
    "CheckpointCommitInfo",
    "CheckpointEngine",
    "DataStatesCheckpointEngine",
    "DecoupledCheckpointEngine",
    "FastCheckpointEngine",
    "MockStorage",
    "TorchCheckpointEngine",
    "checkpoint_engine_of",
    "plan_of",
    "storage_of",
]


@dataclass(frozen=True)
class CheckpointCommitInfo:
    """Which checkpoint a call is about."""

    tag: str
    save_dir: str
    save_latest: bool = True


class CheckpointEngine:
    """Where bytes go, and a client's own state dicts on the disk.

    Attributes:
        storage: what checkpoints are written with; a subclass or a caller may set another.
        wait_for_save: blocks until the training engine's save in the background is on the disk; that engine sets it.
    """

    _is_decoupled: ClassVar[bool] = False

    def __init__(self, config_params: Any = None, storage: Storage | None = None) -> None:
        """Store the storage; None writes files. `config_params` is accepted and not looked at."""
        self.storage = storage or Storage()
        self.wait_for_save: Callable[[], None] = lambda: None
        self._info: CheckpointCommitInfo | None = None

    def create(self, info: CheckpointCommitInfo) -> None:
        """Say which checkpoint the next calls are about."""
        self.set_commit_info(info)

    def makedirs(self, path: str | os.PathLike[str], exist_ok: bool = False) -> None:
        """Make a folder with its parents."""
        Path(path).mkdir(parents=True, exist_ok=exist_ok)

    def save(self, state_dict: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
        """Write a state dict into one file, without pickle (`state_file`); durable when this returns. Not collective.

        Raises:
            UnstorableStateError: a value in it has no plain form.
        """
        write_state(path, state_dict, self.storage)

    def load(self, path: str | os.PathLike[str], map_location: str | torch.device | None = None) -> dict[str, Any]:
        """Read what `save` wrote, or a `torch.save` file of tensors and plain values. Runs no code of the file.

        Raises:
            CheckpointNotFoundError, CheckpointDamagedError: no such file, or it cannot be read so.
        """
        return read_state(path, map_location)

    def commit(self, info: CheckpointCommitInfo | None) -> bool:
        """True, once a save in the background is on the disk; what `save` wrote is there when that returns.

        Raises:
            CheckpointError: the save in the background failed.
        """
        self.wait_for_save()
        self._info = None
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """True: every data-parallel rank writes what it holds."""
        return True

    def is_decoupled(self) -> bool:
        """Whether training goes on before the commit."""
        return self._is_decoupled

    def preserves_storage_sharing(self) -> bool:
        """False: each tensor's elements are written, not the storage that it may be a view of."""
        return False

    def set_commit_info(self, info: CheckpointCommitInfo | None) -> None:
        """Remember what the next `commit` is about."""
        self._info = info

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """What was remembered; None after a commit."""
        return self._info

    def cleanup(self) -> None:
        """Wait for a save in the background.

        Raises:
            CheckpointError: it failed.
        """
        self.wait_for_save()


class TorchCheckpointEngine(CheckpointEngine):
    """The one without a `checkpoint.writer` block."""


class FastCheckpointEngine(CheckpointEngine):
    """The one of a `checkpoint.writer` block."""


class DecoupledCheckpointEngine(FastCheckpointEngine):
    """The one of `checkpoint.async_save` and `checkpoint.writer.decoupled`."""

    _is_decoupled = True


class DataStatesCheckpointEngine(CheckpointEngine):
    """The one of a `datastates_ckpt` block."""

    _is_decoupled = True


class _Nothing(HashedFile):
    """A file that is not there: counts bytes."""

    def __init__(self) -> None:
        self._nbytes = 0

    def write(self, data: memoryview) -> None:
        self._nbytes += len(data)

    def finish(self) -> FileEntry:
        return FileEntry(nbytes=self._nbytes, blocks=["0" * 16] * -(-self._nbytes // BLOCK_NBYTES))

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Nothing is open."""


class _NoLock(Lock):
    def release(self) -> None:
        """Nothing was taken."""


class MockStorage(Storage):
    """Takes everything and keeps nothing: what a save costs without the disk. No checkpoint comes of it."""

    is_kept: ClassVar[bool] = False

    def make_folder(self, path: Path) -> None:
        """Make nothing."""

    def is_folder(self, path: Path) -> bool:
        """As if it had been made."""
        return True

    def create(self, path: Path) -> HashedFile:
        """Open nothing."""
        return _Nothing()

    def sync_folder(self, path: Path) -> None:
        """There is nothing to flush."""

    def rename(self, source: Path, target: Path) -> None:
        """There is nothing to rename."""

    def exchange(self, one: Path, other: Path) -> bool:
        """There is nothing to swap."""
        return True

    def remove(self, path: Path) -> None:
        """Leave what others made."""

    def lock(self, path: Path) -> Lock | None:
        """Take nothing: what is not there needs no lock."""
        return _NoLock(-1)


def storage_of(writer: WriterConfig | None) -> Storage:
    """The storage that a `checkpoint.writer` block asks for; None: the usual one."""
    if writer is None:
        return Storage()
    if writer.type == "MOCK":
        return MockStorage()
    return Storage(
        WriteOptions(
            block_nbytes=writer.io_buffer_size,
            block_count=writer.io_multiplier * (2 if writer.io_buffer_double else 1),
            is_direct=writer.type == "FAST",
        )
    )


def plan_of(checkpoint: CheckpointConfig, datastates: DataStatesConfig | None, zero_stage: int = 0) -> SavePlan:
    """How saves go on."""
    writer = checkpoint.writer
    is_decoupled = writer is not None and writer.decoupled
    limit_gigabytes = float("inf") if datastates is None else datastates.host_cache_size
    return SavePlan(
        is_background=checkpoint.async_save or is_decoupled or datastates is not None,
        waits_at_boundary=is_decoupled,
        limit_nbytes=float("inf") if limit_gigabytes is None else limit_gigabytes * 1e9,
        shows_statistics=writer is not None and writer.show_statistics,
        leaves_scripts=zero_stage > 0,
    )


def checkpoint_engine_of(checkpoint: CheckpointConfig, datastates: DataStatesConfig | None) -> CheckpointEngine:
    """The engine object that a configuration asks for."""
    writer = checkpoint.writer
    kind: type[CheckpointEngine] = TorchCheckpointEngine if writer is None else FastCheckpointEngine
    if datastates is not None:
        kind = DataStatesCheckpointEngine
    elif checkpoint.async_save or (writer is not None and writer.decoupled):
        kind = DecoupledCheckpointEngine
    return kind(storage=storage_of(writer))
