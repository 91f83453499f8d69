from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.disk.manifest import (
    BLOCK_NBYTES,
    FileEntry,
    Fragment,
    Manifest,
    TensorEntry,
    find_cover_fault,
    parts_of,
)
from deepspeed.errors import CheckpointDamagedError, CheckpointError

_PAGE = Path(__file__).parents[4] / "docs/reference/checkpoint-format.md"


def _manifest(version: int = 1, fragments: list[Fragment] | None = None) -> Manifest:
    whole = [Fragment(start=0, length=6, file="rank_00000.safetensors", key="w")]
    return Manifest(
        format="deepspeed-checkpoint",
        version=version,
        library="1.0",
        saved_at="2026-01-01T00:00:00+00:00",
        world_size=1,
        files={"rank_00000.safetensors": FileEntry(nbytes=100, blocks=["0" * 16])},
        tensors={"w": TensorEntry(shape=[2, 3], dtype="F32", fragments=whole if fragments is None else fragments)},
        state={"global_steps": 3, "text": "\u00e9"},
    )


@st.composite
def _cut(draw: st.DrawFn) -> tuple[int, list[Fragment]]:
    lengths = draw(st.lists(st.integers(1, 9), max_size=6))
    fragments, start = [], 0
    for number, length in enumerate(lengths):
        offset = draw(st.integers(0, 3))
        fragments.append(Fragment(start=start, length=length, file=f"f{number}", key="k", offset=offset))
        start += length
    return start, fragments


def test_a_manifest_survives_the_disk() -> None:
    assert Manifest.parse(_manifest().dump(), "m") == _manifest()


def test_the_file_is_json_for_any_other_program() -> None:
    assert json.loads(_manifest().dump())["tensors"]["w"]["shape"] == [2, 3]


def test_every_flipped_bit_is_noticed() -> None:
    raw = _manifest().dump()
    for position in range(len(raw)):
        for bit in range(8):
            flipped = bytearray(raw)
            flipped[position] ^= 1 << bit
            with pytest.raises(CheckpointDamagedError, match=r"folder/manifest.json"):
                Manifest.parse(bytes(flipped), "folder/manifest.json")


def test_every_cut_is_noticed() -> None:
    raw = _manifest().dump()
    for nbytes in range(len(raw)):
        with pytest.raises(CheckpointDamagedError, match=r"manifest.json"):
            Manifest.parse(raw[:nbytes], "manifest.json")


def test_a_newer_format_is_settled_apart_from_damage() -> None:
    with pytest.raises(CheckpointError, match="format version 5; this installation reads up to version 4") as caught:
        Manifest.parse(_manifest(version=5).dump(), "m")
    assert not isinstance(caught.value, CheckpointDamagedError)


def test_a_manifest_that_contradicts_itself_is_damaged() -> None:
    hole = [Fragment(start=0, length=5, file="rank_00000.safetensors", key="w")]
    with pytest.raises(CheckpointDamagedError, match="'w' has a hole"):
        Manifest.parse(_manifest(fragments=hole).dump(), "m")
    stranger = [Fragment(start=0, length=6, file="other.safetensors", key="w")]
    with pytest.raises(CheckpointDamagedError, match="unlisted files"):
        Manifest.parse(_manifest(fragments=stranger).dump(), "m")


@pytest.mark.parametrize("file", ["../secrets", "/etc/passwd", "a/b", ".hidden", ""])
def test_a_manifest_cannot_point_outside_its_folder(file: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        Fragment(start=0, length=1, file=file, key="w")


@given(_cut())
def test_a_cover_without_fault_has_none(cut: tuple[int, list[Fragment]]) -> None:
    numel, fragments = cut
    assert find_cover_fault(numel, [(f.start, f.length) for f in fragments]) is None


@given(st.integers(0, 12), st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=5).map(sorted))
def test_a_fault_is_found_exactly_when_an_element_is_not_held_once(numel: int, spans: list[tuple[int, int]]) -> None:
    held = [element for start, length in spans for element in range(start, start + length)]
    assert (find_cover_fault(numel, spans) is None) == (sorted(held) == list(range(numel)))


@given(_cut(), st.data())
def test_parts_name_every_wanted_element_once_and_in_order(cut: tuple[int, list[Fragment]], data: st.DataObject) -> None:
    numel, fragments = cut
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    stored = {f.start + i: (f.file, f.offset + i) for f in fragments for i in range(f.length)}
    got: list[tuple[str, int]] = []
    for part in parts_of(fragments, start, stop - start):
        assert part.at == len(got)
        got += [(part.file, part.start + i) for i in range(part.length)]
    assert got == [stored[element] for element in range(start, stop)]


def test_the_reference_page_holds_the_schema_of_the_code() -> None:
    page = _PAGE.read_text()
    schema = page.split("```json schema\n")[1].split("```")[0]
    assert json.loads(schema) == Manifest.model_json_schema()


def test_hashes_of_blocks_must_be_as_many_as_the_file_has() -> None:
    FileEntry(nbytes=BLOCK_NBYTES + 1, blocks=["0" * 16] * 2)
    with pytest.raises(ValueError, match="1 blocks do not make"):
        FileEntry(nbytes=BLOCK_NBYTES + 1, blocks=["0" * 16])


def test_no_file_goes_without_a_hash() -> None:
    FileEntry(nbytes=0)
    with pytest.raises(ValueError, match="1 bytes have no hash"):
        FileEntry(nbytes=1)


@pytest.mark.parametrize("blocks", [[], ["1" * 16] * 2])
def test_manifests_of_versions_1_and_2_are_read(blocks: list[str]) -> None:
    entry = FileEntry(nbytes=BLOCK_NBYTES + 1, xxh3_128="0" * 32, blocks=blocks)
    older = _manifest(version=1 + bool(blocks)).model_copy(update={"files": {"rank_00000.safetensors": entry}})
    assert Manifest.parse(older.dump(), "m").files["rank_00000.safetensors"] == entry
