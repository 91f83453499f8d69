from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xxhash

from deepspeed.checkpoint import Manifest, Piece, open_checkpoint
from deepspeed.checkpoint.disk.manifest import BLOCK_NBYTES, FileEntry
from deepspeed.checkpoint.disk.storage import Storage
from deepspeed.checkpoint.save.copying import copy_checkpoint
from deepspeed.errors import CheckpointDamagedError
from tests.support.checkpoints import write_checkpoint

_NUMEL = BLOCK_NBYTES // 8 + 100


def _of_version(folder: Path, version: int) -> Path:
    """A checkpoint of a shard of more than one block, as that version of the format described it."""
    made = write_checkpoint(
        folder, "t", [Piece.whole("w", torch.arange(_NUMEL, dtype=torch.int64))], {}, {}, rank=0, world_size=1
    )
    manifest = Manifest.parse((made / "manifest.json").read_bytes(), "m")
    files = {}
    for name, entry in manifest.files.items():
        whole = None if version == 3 else xxhash.xxh3_128_hexdigest((made / name).read_bytes())
        has_blocks = version == 3 or (version == 2 and len(entry.blocks) > 1)
        files[name] = FileEntry(nbytes=entry.nbytes, xxh3_128=whole, blocks=entry.blocks if has_blocks else [])
    older = manifest.model_copy(update={"version": version, "files": files})
    (made / "manifest.json").write_bytes(older.dump())
    return made


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_checkpoint_of_every_version_is_copied_and_loads(tmp_path: Path, version: int) -> None:
    made = _of_version(tmp_path / "one", version)
    copy = copy_checkpoint(made, tmp_path / "other", "t", Storage(), save_latest=True)
    assert (copy / "manifest.json").read_bytes() == (made / "manifest.json").read_bytes()
    assert torch.equal(open_checkpoint(tmp_path / "other").read("w"), torch.arange(_NUMEL))


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("name", ["client_state.json", "rank_00000.safetensors"])
def test_damage_is_not_copied(tmp_path: Path, version: int, name: str) -> None:
    made = _of_version(tmp_path / "one", version)
    data = bytearray((made / name).read_bytes())
    data[-1] ^= 1
    (made / name).write_bytes(data)
    with pytest.raises(CheckpointDamagedError, match=f"{name} differs"):
        copy_checkpoint(made, tmp_path / "other", "t", Storage(), save_latest=True)
    assert not (tmp_path / "other" / "t").exists()
