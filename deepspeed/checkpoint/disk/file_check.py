"""Files against the hashes that a manifest has for them.

Does not live here: what the files hold (`reader`). Called by all that reads our files, and by
`original.reading.share_check` to share the work out over ranks. Loads no torch.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from deepspeed.checkpoint.disk.manifest import FileEntry
from deepspeed.checkpoint.disk.storage import open_run
from deepspeed.checkpoint.disk.tags import list_tags
from deepspeed.errors import CheckpointDamagedError

__all__ = ["check_files", "find_file_fault", "share_files"]

_HASH_NBYTES = 1 << 20


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
        found = pool.map(lambda file: find_file_fault(folder / file, files[file]), files)
        faults = [fault for fault in found if fault]
    if faults:
        raise CheckpointDamagedError(
            f"checkpoint {folder} is damaged: {'; '.join(faults)}. Nothing was loaded. Load an older tag "
            f"(there: {', '.join(list_tags(folder.parent))}), or bring the file again from where it was copied."
        )


def find_file_fault(path: Path, entry: FileEntry) -> str | None:
    """What is wrong with a file, compared with its manifest entry; None when nothing is."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_HASH_NBYTES))
    try:
        with open_run(path) as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes != entry.nbytes:
                return f"{path.name} has {nbytes} bytes instead of {entry.nbytes}"
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    except OSError as error:
        return f"{path.name} cannot be read ({error})"
    return (
        None
        if digest.hexdigest() == entry.xxh3_128
        else f"{path.name} differs from what was written (its hash does not match)"
    )


def share_files(sizes: Mapping[str, int], world_size: int) -> list[list[str]]:
    """Give each rank some of the files so that the bytes come out even: largest first, each to the rank with the least."""
    shares: list[list[str]] = [[] for _ in range(world_size)]
    loads = [(0, rank) for rank in range(world_size)]
    for file in sorted(sizes, key=lambda file: (-sizes[file], file)):
        nbytes, rank = heapq.heappop(loads)
        shares[rank].append(file)
        heapq.heappush(loads, (nbytes + sizes[file], rank))
    return shares
