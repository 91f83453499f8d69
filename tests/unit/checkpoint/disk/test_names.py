from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.disk import names
from deepspeed.checkpoint.disk.storage import Storage
from deepspeed.checkpoint.original.writing.conversion_folder import written_aside
from deepspeed.errors import ArgumentError

_NAMES = st.text("ab@0123/", min_size=1, max_size=6)


@given(st.tuples(_NAMES, st.integers(0, 30), st.booleans()), st.tuples(_NAMES, st.integers(0, 30), st.booleans()))
def test_two_fragments_that_may_stand_in_one_file_never_share_a_key(
    one: tuple[str, int, bool], other: tuple[str, int, bool]
) -> None:
    one_key, other_key = (
        names.fragment_key(name, 0 if is_whole else start, is_whole=is_whole) for name, start, is_whole in (one, other)
    )
    if one_key == other_key:
        assert one[0] == other[0]


def test_a_whole_tensor_stands_under_its_own_name() -> None:
    assert names.fragment_key("module/fc.weight", 0, is_whole=True) == "module/fc.weight"
    assert names.fragment_key("module/fc.weight", 7, is_whole=False) == "module/fc.weight@7"


@given(st.text("ab./", min_size=1), st.text("ab_/%2F5", min_size=1))
def test_an_optimizer_name_comes_apart_again(parameter: str, key: str) -> None:
    assert names.split_optimizer_tensor(names.optimizer_tensor(parameter, key)) == (parameter, key)


@pytest.mark.parametrize("tag", ["global_step10", "epoch=0-step=3.ckpt", "epoch1/step5", "10", "a b"])
def test_ordinary_tags_name_a_folder_inside(tag: str) -> None:
    assert names.tag_folder(Path("saves"), tag) == Path("saves") / tag


@pytest.mark.parametrize(
    "tag",
    [
        "",
        ".",
        "..",
        "../other",
        "/abs",
        "a/../b",
        ".hidden",
        "a/.b",
        "latest",
        "latest/x",
        "latest/",
        "latest_universal/x",
        "nul\0",
    ],
)
def test_tags_that_leave_the_folder_or_clash_with_our_names_are_refused(tag: str) -> None:
    with pytest.raises(ArgumentError, match="relative name"):
        names.tag_folder(Path("saves"), tag)


@pytest.mark.parametrize("tag", ["a ", " a", "a\n", "a\rb", "a\0", "a/b\t", "\udce9"])
def test_tags_that_latest_could_not_lead_back_to_are_not_saved_under(tag: str) -> None:
    with pytest.raises(ArgumentError, match="Give a"):
        names.new_tag_folder(Path("saves"), tag)


@given(st.text(st.characters(exclude_characters="/"), min_size=1, max_size=6))
def test_a_tag_that_is_saved_under_survives_its_way_through_a_text_file(tag: str) -> None:
    try:
        names.new_tag_folder(Path("saves"), tag)
    except ArgumentError:
        return
    text = io.TextIOWrapper(io.BytesIO(tag.encode()), encoding="utf-8").read()
    assert text.strip() == tag


def test_a_tag_leaves_room_for_the_names_beside_its_folder(tmp_path: Path) -> None:
    longest = "\N{LATIN SMALL LETTER E WITH ACUTE}" * 113
    final = names.new_tag_folder(tmp_path, f"a/{longest}")
    assert len(final.name.encode()) == 226
    with written_aside(final, Storage()) as working:
        assert len(working.name.encode()) == 255
    with pytest.raises(ArgumentError, match=r"too long: .* has 227 bytes. A folder's name may have 226"):
        names.new_tag_folder(tmp_path, longest + "x")
    assert names.tag_folder(tmp_path, longest + "x").name == longest + "x"  # to read what others have saved


def test_only_the_files_of_the_format_are_its_own() -> None:
    own = ["manifest.json", "client_state.json", names.shard_file(0), names.shard_file(123456)]
    assert all(names.is_own_file(name) for name in own)
    assert not any(names.is_own_file(name) for name in ["model.safetensors", "rank_0.safetensors", "notes.txt", "latest"])
