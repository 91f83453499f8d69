"""Storages that fail: the disk fills up, an operation is refused, or the process is killed at one operation."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.disk.storage import HashedFile, Storage


class NoExchange(Storage):
    """A file system that cannot swap two names."""

    def exchange(self, one: Path, other: Path) -> bool:
        return False


class Refusing(Storage):
    """Raises `error` at the operations that `refuses(name, path)` picks."""

    def __init__(self, refuses: Callable[[str, Path], bool], number: int = errno.EIO) -> None:
        super().__init__()
        self._refuses = refuses
        self._number = number

    def _check(self, name: str, path: Path) -> None:
        if self._refuses(name, path):
            raise OSError(self._number, os.strerror(self._number), str(path))

    def make_folder(self, path: Path) -> None:
        self._check("make_folder", path)
        super().make_folder(path)

    def create(self, path: Path) -> HashedFile:
        self._check("create", path)
        return super().create(path)

    def sync_folder(self, path: Path) -> None:
        self._check("sync_folder", path)
        super().sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self._check("rename", source)
        super().rename(source, target)

    def exchange(self, one: Path, other: Path) -> bool:
        self._check("exchange", one)
        return super().exchange(one, other)

    def remove(self, path: Path) -> None:
        self._check("remove", path)
        super().remove(path)


class FullDisk(Storage):
    """Takes `nbytes_left` bytes, in all files together, and no more."""

    def __init__(self, nbytes_left: int) -> None:
        super().__init__()
        self.nbytes_left = nbytes_left

    def create(self, path: Path) -> HashedFile:
        storage = self

        class _File(HashedFile):
            def write(self, data: memoryview) -> None:
                taken = data[: storage.nbytes_left]
                storage.nbytes_left -= len(taken)
                super().write(taken)
                if len(taken) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        return _File(path)


def killed_at(operation: int, base: type[Storage] = Storage) -> Storage:
    """A storage whose process ends, without any clean-up, just before its `operation`-th operation; each write counts."""
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        if done > operation:
            os._exit(9)

    class _File(HashedFile):
        def write(self, data: memoryview) -> None:
            count()
            super().write(data[: len(data) // 2])
            count()
            super().write(data[len(data) // 2 :])

        def finish(self) -> Any:
            count()
            return super().finish()

    class _Killed(base):  # type: ignore[misc, valid-type]
        def create(self, path: Path) -> HashedFile:
            count()
            return _File(path)

        def __getattribute__(self, name: str) -> Any:
            if name in ("make_folder", "sync_folder", "rename", "exchange", "remove", "lock"):
                count()
            return super().__getattribute__(name)

    return _Killed()
