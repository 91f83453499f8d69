from __future__ import annotations

from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.disk.file_check import BlockRun, check_files, check_runs, share_blocks
from deepspeed.checkpoint.disk.manifest import BLOCK_NBYTES, FileEntry
from deepspeed.checkpoint.disk.storage import Storage, WriteOptions
from deepspeed.errors import CheckpointDamagedError


def _entry(nbytes: int, *, has_blocks: bool) -> FileEntry:
    """Of the present version, or of version 1."""
    if has_blocks:
        return FileEntry(nbytes=nbytes, blocks=["0" * 16] * -(-nbytes // BLOCK_NBYTES))
    return FileEntry(nbytes=nbytes, xxh3_128="0" * 32)


@given(sizes=st.lists(st.tuples(st.integers(0, 5 * BLOCK_NBYTES), st.booleans()), max_size=6), world_size=st.integers(1, 5))
def test_every_block_is_checked_by_one_rank(sizes: list[tuple[int, bool]], world_size: int) -> None:
    files = {f"f{n}": _entry(nbytes, has_blocks=has_blocks) for n, (nbytes, has_blocks) in enumerate(sizes)}
    shares = share_blocks(files, world_size)
    checked = sorted((run.file, block) for share in shares for run in share for block in range(run.first, run.stop))
    assert checked == [(file, block) for file in sorted(files) for block in range(max(1, len(files[file].blocks)))]


@given(sizes=st.lists(st.integers(1, 9 * BLOCK_NBYTES), min_size=1, max_size=6), world_size=st.integers(1, 5))
def test_bytes_come_out_even_to_one_block(sizes: list[int], world_size: int) -> None:
    files = {f"f{n}": _entry(nbytes, has_blocks=True) for n, nbytes in enumerate(sizes)}
    for share in share_blocks(files, world_size):
        numbers = [(files[run.file].nbytes, block) for run in share for block in range(run.first, run.stop)]
        nbytes = sum(min(BLOCK_NBYTES, size - block * BLOCK_NBYTES) for size, block in numbers)
        assert abs(nbytes - sum(sizes) / world_size) <= BLOCK_NBYTES


@pytest.fixture(params=[True, False], ids=["direct", "through the cache"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, FileEntry]]:
    """A file of three blocks, the last one short, written in odd steps."""
    data = bytes(range(256)) * ((2 * BLOCK_NBYTES + 512) // 256)
    with Storage(WriteOptions(is_direct=request.param)).create(tmp_path / "f") as file:
        for start in range(0, len(data), 7_000_001):
            file.write(memoryview(data)[start : start + 7_000_001])
        return tmp_path, {"f": file.finish()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_flipped_bit_is_found_by_the_rank_whose_block_it_is_in(
    written: tuple[Path, dict[str, FileEntry]], world_size: int
) -> None:
    folder, files = written
    check_files(folder, files)
    shares = share_blocks(files, world_size)
    for place in (0, BLOCK_NBYTES - 1, BLOCK_NBYTES, 2 * BLOCK_NBYTES + 511):
        _flip(folder / "f", place)
        found = [_is_found(folder, files, share) for share in shares]
        owner = [any(run.first <= place // BLOCK_NBYTES < run.stop for run in share) for share in shares]
        assert found == owner
        _flip(folder / "f", place)
    for share in shares:
        check_runs(folder, files, share)


def _flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def _is_found(folder: Path, files: dict[str, FileEntry], share: list[BlockRun]) -> bool:
    try:
        check_runs(folder, files, share)
    except CheckpointDamagedError:
        return True
    return False


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("nbytes", [1000, BLOCK_NBYTES + 1000])
def test_damage_is_found_by_the_hashes_of_every_version(tmp_path: Path, version: int, nbytes: int) -> None:
    data = bytes(range(250)) * (nbytes // 250 + 1)
    with Storage().create(tmp_path / "f") as file:
        file.write(memoryview(data)[:nbytes])
        entry = file.finish()
    if version < 3:
        has_blocks = version == 2 and nbytes > BLOCK_NBYTES
        whole = xxhash.xxh3_128_hexdigest(data[:nbytes])
        entry = FileEntry(nbytes=nbytes, xxh3_128=whole, blocks=entry.blocks if has_blocks else [])
    check_files(tmp_path, {"f": entry})
    _flip(tmp_path / "f", nbytes - 1)
    with pytest.raises(CheckpointDamagedError, match="f differs from what was written"):
        check_files(tmp_path, {"f": entry})
