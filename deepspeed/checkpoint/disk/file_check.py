"""Files against the hashes that a manifest has for them.

Does not live here: what the files hold (`reader`). Called by all that reads our files, and by
`original.reading.share_check` to share the work out over ranks. Loads no torch.
"""

from __future__ import annotations

import heapq
import io
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from deepspeed.checkpoint.disk.manifest import BLOCK_NBYTES, FileEntry
from deepspeed.checkpoint.disk.storage import open_run
from deepspeed.checkpoint.disk.tags import list_tags
from deepspeed.errors import CheckpointDamagedError

__all__ = ["BlockRun", "check_files", "check_runs", "find_file_fault", "share_blocks", "share_files"]

_READ_NBYTES = 512 << 10  # stays in a core's own cache until it is hashed


class BlockRun(NamedTuple):
    """Blocks `[first, stop)` of a file; a file without hashes of blocks is one block."""

    file: str
    first: int
    stop: int


def check_files(folder: Path, files: Mapping[str, FileEntry], thread_count: int = 1) -> None:
    """Compare files of a checkpoint with what was written.

    Args:
        folder: the tag's folder.
        files: name -> what the manifest says of it.
        thread_count: files that are read at the same time.

    Raises:
        CheckpointDamagedError: naming every file that is missing, cut short or changed.
    """
    with ThreadPoolExecutor(thread_count) as pool:
        _refuse(folder, pool.map(lambda file: find_file_fault(folder / file, files[file]), files))


def check_runs(folder: Path, files: Mapping[str, FileEntry], runs: Iterable[BlockRun]) -> None:
    """Compare some blocks of files with what was written; otherwise as `check_files`."""
    _refuse(folder, (_find_run_fault(folder / run.file, files[run.file], run) for run in runs))


def _refuse(folder: Path, found: Iterable[str | None]) -> None:
    faults = [fault for fault in found if fault]
    if faults:
        raise CheckpointDamagedError(
            f"checkpoint {folder} is damaged: {'; '.join(faults)}. Nothing was loaded. Load an older tag "
            f"(there: {', '.join(list_tags(folder.parent))}), or bring the file again from where it was copied."
        )


def find_file_fault(path: Path, entry: FileEntry) -> str | None:
    """What is wrong with a file, compared with its manifest entry; None when nothing is."""
    return _find_run_fault(path, entry, BlockRun(path.name, 0, max(1, len(entry.blocks))))


def _find_run_fault(path: Path, entry: FileEntry, run: BlockRun) -> str | None:
    if not entry.blocks:  # of version 1, or empty
        whole = entry.xxh3_128
        return _fault(path, entry, lambda file: whole in (None, _digest(file, entry.nbytes, xxhash.xxh3_128())))

    def is_right(file: io.FileIO) -> bool:
        file.seek(run.first * BLOCK_NBYTES)
        wanted = entry.blocks[run.first : run.stop]
        return all(_digest(file, BLOCK_NBYTES, xxhash.xxh3_64()) == digest for digest in wanted)

    return _fault(path, entry, is_right)


def _fault(path: Path, entry: FileEntry, is_right: Callable[[io.FileIO], bool]) -> str | None:
    try:
        with open_run(path) as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes != entry.nbytes:
                return f"{path.name} has {nbytes} bytes instead of {entry.nbytes}"
            if not is_right(file):
                return f"{path.name} differs from what was written (its hash does not match)"
    except OSError as error:
        return f"{path.name} cannot be read ({error})"
    return None


def _digest(file: io.FileIO, nbytes: int, hasher: Any) -> str:
    """Hash the next `nbytes` of a file, or all up to its end."""
    buffer = memoryview(bytearray(min(nbytes, _READ_NBYTES)))
    while nbytes and (count := file.readinto(buffer[:nbytes])):
        hasher.update(buffer[:count])
        nbytes -= count
    digest: str = hasher.hexdigest()
    return digest


def share_blocks(files: Mapping[str, FileEntry], world_size: int) -> list[list[BlockRun]]:
    """Give each rank a run of all blocks in order, so that the bytes come out even to one block."""
    total_nbytes = sum(entry.nbytes for entry in files.values())
    shares: list[list[BlockRun]] = [[] for _ in range(world_size)]
    seen_nbytes = 0
    for file in sorted(files):
        left_nbytes = files[file].nbytes
        for block in range(max(1, len(files[file].blocks))):
            nbytes = min(left_nbytes, BLOCK_NBYTES) if files[file].blocks else left_nbytes
            middle = seen_nbytes + nbytes // 2
            share = shares[min(world_size - 1, middle * world_size // max(1, total_nbytes))]
            if share and share[-1].file == file:
                share[-1] = share[-1]._replace(stop=block + 1)
            else:
                share.append(BlockRun(file, block, block + 1))
            left_nbytes -= nbytes
            seen_nbytes += nbytes
    return shares


def share_files(sizes: Mapping[str, int], world_size: int) -> list[list[str]]:
    """Give each rank some of the files so that the bytes come out even: largest first, each to the rank with the least."""
    shares: list[list[str]] = [[] for _ in range(world_size)]
    loads = [(0, rank) for rank in range(world_size)]
    for file in sorted(sizes, key=lambda file: (-sizes[file], file)):
        nbytes, rank = heapq.heappop(loads)
        shares[rank].append(file)
        heapq.heappush(loads, (nbytes + sizes[file], rank))
    return shares
