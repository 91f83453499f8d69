"""Tensors that ranks hold in parts: written under one cut, read whole and under another."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from deepspeed.checkpoint import Piece, open_checkpoint
from deepspeed.checkpoint import parts as parts_module
from deepspeed.checkpoint.disk import gathering
from deepspeed.checkpoint.disk.manifest import Manifest
from deepspeed.checkpoint.export.weights_source import OwnWeights
from deepspeed.checkpoint.export.weights_table import Kind, Weight
from deepspeed.checkpoint.parts import read_part
from deepspeed.errors import ArgumentError, CheckpointDamagedError, CheckpointError
from deepspeed.sharding import Cut, Span
from tests.support.checkpoints import write_checkpoint
from tests.support.original_net import FIXTURES
from tests.support.random_cuts import part_of, two_cuts
from tests.unit.checkpoint.thread_ranks import ThreadRanks, run_threads, use_thread_ranks


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    use_thread_ranks(monkeypatch)


def _write(folder: Path, cut: Cut, whole: Any, bounds: list[list[int]] | None = None) -> Path:
    """Each rank writes its part of `w`, in pieces between `bounds`, and a tensor that is not cut."""

    def write(ranks: ThreadRanks) -> Any:
        part = torch.from_numpy(part_of(cut, whole, ranks.rank).copy()).reshape(-1)
        inner = [] if bounds is None else bounds[ranks.rank]
        pieces = [
            Piece("w", cut.shape, cut.stored_starts()[ranks.rank] + low, part[low:high], cut)
            for low, high in zip([0, *inner], [*inner, part.numel()], strict=True)
        ]
        if ranks.rank == 0:
            pieces.append(Piece.whole("v", torch.ones(2)))
        return write_checkpoint(folder, "t", pieces, {}, {}, rank=ranks.rank, world_size=cut.ranks, group=ranks)

    assert run_threads(cut.ranks, write) == [folder / "t"] * cut.ranks
    return folder / "t"


@given(cuts=two_cuts(along_one=False), data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_what_was_written_under_one_cut_is_read_under_another(
    cuts: tuple[Cut, Cut], data: st.DataObject, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stored, wanted = cuts
    whole = np.arange(np.prod(stored.shape), dtype="<i4").reshape(stored.shape)
    numels = [int(np.prod(stored.part_shape(rank))) for rank in range(stored.ranks)]
    bounds = [sorted(data.draw(st.lists(st.integers(0, numel), max_size=2))) for numel in numels]
    folder = tmp_path_factory.mktemp("save")
    _write(folder, stored, whole, bounds)
    source = open_checkpoint(folder)
    assert source.shape("w") == stored.shape
    assert source.cut("w") == (None if stored.is_in_order else stored)
    assert source.cut("v") is None
    flat = torch.from_numpy(whole).reshape(-1).to(dtype)
    assert torch.equal(source.read("w").to(dtype), flat)
    low, high = sorted(data.draw(st.tuples(st.integers(0, len(flat)), st.integers(0, len(flat)))))
    assert torch.equal(source.read("w", low, out=torch.empty(high - low, dtype=dtype)), flat[low:high])
    for rank in range(wanted.ranks):
        part = torch.from_numpy(part_of(wanted, whole, rank).copy()).reshape(-1).to(dtype)
        start, stop = sorted(data.draw(st.tuples(st.integers(0, len(part)), st.integers(0, len(part)))))
        out = torch.empty(stop - start, dtype=dtype)
        assert torch.equal(read_part(source, "w", wanted, rank, start, out), part[start:stop])
    weight = Weight("w", "w", Kind.TRAINED, stored.shape, "I32")
    assert b"".join(bytes(block) for block in OwnWeights(folder / "t").blocks(weight)) == whole.tobytes()
    shutil.rmtree(folder)


def _columns(ranks: int) -> Cut:
    return Cut.of_widths((6, 8), 1, [8 // ranks] * ranks)


WHOLE = np.arange(48, dtype="<i4").reshape(6, 8)


def test_the_manifest_says_the_cut_and_has_a_version_of_its_own(tmp_path: Path) -> None:
    manifest = Manifest.parse((_write(tmp_path, _columns(2), WHOLE) / "manifest.json").read_bytes(), "m")
    assert manifest.version == 4
    cut = manifest.tensors["w"].cut
    assert cut is not None
    assert (cut.dim, cut.parts) == (1, [[[0, 4]], [[4, 4]]])
    assert [(part.start, part.length, part.key) for part in manifest.tensors["w"].fragments] == [
        (0, 24, "w@0"),
        (24, 24, "w@24"),
    ]
    assert manifest.tensors["v"].cut is None


def test_a_cut_in_order_is_not_mentioned_and_older_versions_read_it(tmp_path: Path) -> None:
    folder = _write(tmp_path, Cut.of_widths((6, 8), 0, [2, 4]), WHOLE)
    manifest = Manifest.parse((folder / "manifest.json").read_bytes(), "m")
    assert manifest.version == 3
    assert b'"cut"' not in (folder / "manifest.json").read_bytes()
    assert torch.equal(open_checkpoint(tmp_path).read("w").view(6, 8), torch.from_numpy(WHOLE))


def test_an_equal_part_is_read_without_any_other_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, _columns(2), WHOLE)
    source = open_checkpoint(tmp_path)
    asked: list[tuple[int, int]] = []
    read = type(source)._read_bytes  # type: ignore[attr-defined]

    def count(self: Any, name: str, start: int, into: memoryview) -> None:
        asked.append((start, len(into)))
        read(self, name, start, into)

    monkeypatch.setattr(type(source), "_read_bytes", count)
    out = torch.empty(10, dtype=torch.int32)
    read_part(source, "w", _columns(2), 1, 5, out)
    assert out.tolist() == WHOLE[:, 4:].reshape(-1)[5:15].tolist()
    assert asked == [(24 + 5, 40)]


def test_elements_are_converted_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "_STAGING_NUMEL", 5)
    _write(tmp_path, _columns(2), WHOLE)
    out = torch.zeros(2 * 12, dtype=torch.float64)[::2]
    read_part(open_checkpoint(tmp_path), "w", _columns(4), 2, 0, out)
    assert out.tolist() == WHOLE[:, 4:6].reshape(-1).tolist()


def test_a_range_beyond_the_part_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, _columns(2), WHOLE)
    with pytest.raises(ArgumentError, match="elements 1 to 25 of 'part 1 of w' were asked for; it has 24"):
        read_part(open_checkpoint(tmp_path), "w", _columns(2), 1, 1, torch.empty(24))
    with pytest.raises(ArgumentError, match="Both must be the same"):
        read_part(open_checkpoint(tmp_path), "w", Cut.of_widths((6, 4), 1, [4]), 0, 0, torch.empty(24))


@pytest.mark.parametrize("other", [Cut.of_widths((6, 8), 1, [3, 5]), None], ids=["other", "none"])
def test_ranks_that_cut_otherwise_are_told(other: Cut | None, tmp_path: Path) -> None:
    def write(ranks: ThreadRanks) -> Any:
        cut = _columns(2) if ranks.rank == 0 else other
        pieces = [Piece("w", (6, 8), 24 * ranks.rank, torch.zeros(24), cut)]
        return write_checkpoint(tmp_path, "t", pieces, {}, {}, rank=ranks.rank, world_size=2, group=ranks)

    for error in run_threads(2, write):
        assert isinstance(error, CheckpointError)
        assert "tensor 'w' is cut as" in str(error)
        assert "on rank 1, but cut as {'dim': 1, 'parts': [[[0, 4]], [[4, 4]]]} on rank 0" in str(error)


def test_copies_are_stored_as_often_and_a_missing_one_is_a_hole(tmp_path: Path) -> None:
    copies = Cut((2, 4), 0, ((Span(0, 2),), (Span(0, 2),)))
    whole = np.arange(8, dtype="<i4").reshape(2, 4)
    folder = _write(tmp_path, copies, whole)
    assert Manifest.parse((folder / "manifest.json").read_bytes(), "m").tensors["w"].stored_numel == 16
    with pytest.raises(CheckpointError, match="nobody holds elements 8 to 16 of 16"):
        write_checkpoint(tmp_path, "u", [Piece("w", (2, 4), 0, torch.zeros(8), copies)], {}, {}, rank=0, world_size=1)


def test_a_cut_that_does_not_cover_the_tensor_is_damage(tmp_path: Path) -> None:
    folder = _write(tmp_path, _columns(2), WHOLE)
    manifest = Manifest.parse((folder / "manifest.json").read_bytes(), "m")
    entry = manifest.tensors["w"]
    assert entry.cut is not None
    broken = entry.model_copy(update={"cut": entry.cut.model_copy(update={"parts": [[[0, 4]], [[5, 3]]]})})
    raw = manifest.model_copy(update={"tensors": {**manifest.tensors, "w": broken}}).dump()
    with pytest.raises(CheckpointDamagedError, match=r"'w' has a cut that is none: .* do not cover dimension 1"):
        Manifest.parse(raw, "m")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_are_read_from_the_originals_slices(ranks: int) -> None:
    """Two of its tensor-parallel ranks wrote a fused matrix and one that is cut along its columns."""
    folder = FIXTURES / "tp2-fused-stage1-bf16"
    source = open_checkpoint(folder)
    expected = load_file(folder / "expected_model.safetensors")
    sections = [[4 // ranks] * ranks] * 3
    cuts = {
        "layers.0.qkv.weight": Cut.of_widths((12, 6), 0, *sections),
        "layers.0.qkv.bias": Cut.of_widths((12,), 0, *sections),
        "layers.0.down.weight": Cut.of_widths((6, 4), 1, sections[0]),
        "emb.weight": Cut.of_widths((6, 5), 1, [5, *[0] * (ranks - 1)]),
    }
    for name, cut in cuts.items():
        assert source.cut(f"master/{name}") is None
        for rank in range(ranks):
            part = torch.empty(cut.part_shape(rank))
            read_part(source, f"master/{name}", cut, rank, 0, part.view(-1))
            wanted = torch.from_numpy(part_of(cut, expected[name].float().numpy(), rank).copy())
            assert torch.equal(part.bfloat16(), wanted.bfloat16())


def test_putting_parts_together_takes_a_block_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_BLOCK_NBYTES", 1 << 16)
    whole = np.arange(1 << 19, dtype="<i4").reshape(1 << 10, 1 << 9)
    _write(tmp_path, Cut.of_widths(whole.shape, 1, [1 << 8] * 2), whole)
    source, out = open_checkpoint(tmp_path), torch.empty(whole.size, dtype=torch.int32)
    source.read("w", out=out)  # headers are read once
    tracemalloc.start()
    try:
        source.read("w", out=out)
        peak_nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(out.numpy(), whole.reshape(-1))
    assert peak_nbytes < 2 * (1 << 16)
