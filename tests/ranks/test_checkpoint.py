from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed import comm
from deepspeed.checkpoint import Piece, open_checkpoint, resolve_tag
from deepspeed.checkpoint.disk.storage import HashedFile, Storage
from deepspeed.errors import CheckpointDamagedError, CheckpointError
from tests.support.checkpoints import write_checkpoint
from tests.support.ranks import RanksFailed, run_ranks
from tests.unit.checkpoint.faulty_storage import FullDisk

_NUMEL = 10
_WORLDS = [1, 2, 3]


def _own_range(rank: int, world_size: int) -> tuple[int, int]:
    return _NUMEL * rank // world_size, _NUMEL * (rank + 1) // world_size


def _pieces(rank: int, world_size: int, value: float) -> list[Piece]:
    """Two tensors that all ranks share, in two dtypes, and one that the last rank writes alone."""
    start, stop = _own_range(rank, world_size)
    elements = torch.arange(_NUMEL, dtype=torch.float64)[start:stop] + value
    shared = [Piece("master/w", (2, 5), start, elements), Piece("module/w", (2, 5), start, elements.bfloat16())]
    return shared + ([Piece.whole("module/step", torch.tensor(value))] if rank == world_size - 1 else [])


def _save(rank: int, world_size: int, folder: str, tag: str, value: float, storage: Storage | None = None) -> None:
    write_checkpoint(
        folder,
        tag,
        _pieces(rank, world_size, value),
        {"value": value},
        {"note": f"from rank {rank}"},
        rank=rank,
        world_size=world_size,
        rank_state={"rng": torch.get_rng_state(), "rank": rank},
        storage=storage,
    )


def _load(rank: int, world_size: int, folder: str) -> tuple[str, float, list[float], str]:
    """Read this rank's share; give tag, value, the share, and the note of the client state."""
    reader = open_checkpoint(folder, resolve_tag(folder, rank=rank, world_size=world_size), rank=rank, world_size=world_size)
    start, stop = _own_range(rank, world_size)
    share = reader.read("master/w", start, stop - start)
    assert torch.equal(share.bfloat16(), reader.read("module/w", start, stop - start))
    assert reader.state["value"] == reader.read("module/step").item()
    return reader.tag, reader.state["value"], share.tolist(), reader.client_state()["note"]


def _load_all(folder: Path, world_size: int) -> tuple[str, float]:
    """Load on some ranks; check that together they hold the tensor; give tag and value."""
    loaded = run_ranks(_load, world_size, str(folder))
    tags, values, shares, notes = zip(*loaded, strict=True)
    assert len(set(tags)) == len(set(values)) == 1
    assert [element for share in shares for element in share] == [values[0] + n for n in range(_NUMEL)]
    assert set(notes) == {"from rank 0"}
    return tags[0], values[0]


@pytest.mark.parametrize("writers", _WORLDS)
def test_what_some_ranks_write_any_number_of_ranks_reads(writers: int, tmp_path: Path) -> None:
    run_ranks(_save, writers, str(tmp_path), "step1", 1.0)
    assert [_load_all(tmp_path, readers) for readers in _WORLDS] == [("step1", 1.0)] * 3


def _load_own_state(rank: int, world_size: int, folder: str) -> bool:
    state = open_checkpoint(folder, rank=rank, world_size=world_size).rank_state(rank)
    return state["rank"] == rank and torch.equal(state["rng"], torch.get_rng_state())


def test_each_rank_finds_its_own_state(tmp_path: Path) -> None:
    run_ranks(_save, 3, str(tmp_path), "step1", 1.0)
    assert run_ranks(_load_own_state, 3, str(tmp_path)) == [True] * 3


def _save_in_a_group(rank: int, world_size: int, folder: str) -> str | None:
    """Ranks 1 and 2 of three save by themselves."""
    group = comm.new_group([1, 2])
    if rank == 0:
        return None
    pieces = _pieces(rank - 1, 2, 4.0)
    state = {"value": 4.0}
    write_checkpoint(folder, "t", pieces, state, {"note": "from rank 0"}, rank=rank - 1, world_size=2, group=group)
    return resolve_tag(folder, rank=rank - 1, world_size=2, group=group)


def test_a_group_that_lacks_the_first_rank_saves_and_loads_by_itself(tmp_path: Path) -> None:
    assert run_ranks(_save_in_a_group, 3, str(tmp_path)) == [None, "t", "t"]
    assert _load_all(tmp_path, 1) == ("t", 4.0)


def _meet_errors(rank: int, world_size: int, folder: str) -> list[tuple[str, str]]:
    """Class and text of each error that this rank meets; nothing may hang."""
    met = []

    def attempt(body: Any) -> None:
        try:
            body()
        except CheckpointError as error:
            met.append((type(error).__name__, str(error)))

    full = FullDisk(40 if rank == 1 else 1_000_000)
    attempt(lambda: _save(rank, world_size, folder, "step1", 2.0, full))
    attempt(lambda: resolve_tag(folder, "step9", rank=rank, world_size=world_size))
    return met


def test_errors_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(_save, 3, str(tmp_path), "step1", 1.0)
    met = run_ranks(_meet_errors, 3, str(tmp_path))
    assert met[0] == met[1] == met[2]
    (full_kind, full), (missing_kind, missing) = met[0]
    assert (full_kind, missing_kind) == ("CheckpointError", "CheckpointNotFoundError")
    assert "rank 1: could not write rank_00001.safetensors" in full
    assert "Tags there: 'step1'" in missing
    assert _load_all(tmp_path, 2) == ("step1", 1.0)


def _open_damaged(rank: int, world_size: int, folder: str) -> str:
    with pytest.raises(CheckpointDamagedError) as caught:
        open_checkpoint(folder, rank=rank, world_size=world_size)
    return str(caught.value)


def test_one_flipped_bit_is_named_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(_save, 2, str(tmp_path), "step1", 1.0)
    path = tmp_path / "step1" / "rank_00001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    texts = run_ranks(_open_damaged, 3, str(tmp_path))
    assert len(set(texts)) == 1
    assert "rank_00001.safetensors differs from what was written" in texts[0]


class _KilledWhileWriting(Storage):
    """The process is killed as by `kill -9` when it has written half of its shard."""

    def create(self, path: Path) -> HashedFile:
        class _File(HashedFile):
            def write(self, data: memoryview) -> None:
                super().write(data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)

        return _File(path)


class _KilledBeforeTheRename(Storage):
    """The process is killed when everything is written and nothing is renamed."""

    def sync_folder(self, path: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _save_and_be_killed(rank: int, world_size: int, folder: str, tag: str, killed: int, storage: type[Storage]) -> None:
    _save(rank, world_size, folder, tag, 2.0, storage() if rank == killed else None)


@pytest.mark.parametrize(
    ("killed", "storage", "tag"),
    [(0, _KilledWhileWriting, "step2"), (2, _KilledWhileWriting, "step1"), (0, _KilledBeforeTheRename, "step1")],
    ids=["first rank writing a new tag", "last rank writing the same tag", "first rank before the rename over the same tag"],
)
def test_a_rank_killed_during_a_save_costs_that_save_only(
    killed: int, storage: type[Storage], tag: str, tmp_path: Path
) -> None:
    run_ranks(_save, 3, str(tmp_path), "step1", 1.0)
    with pytest.raises(RanksFailed, match=f"rank {killed} died"):
        run_ranks(_save_and_be_killed, 3, str(tmp_path), tag, killed, storage)
    assert _load_all(tmp_path, 2) == ("step1", 1.0)
    run_ranks(_save, 2, str(tmp_path), tag, 3.0)
    assert _load_all(tmp_path, 3) == (tag, 3.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"latest", "step1", tag})
