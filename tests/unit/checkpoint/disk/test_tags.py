from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from deepspeed.checkpoint import open_checkpoint
from deepspeed.checkpoint.disk.tags import hint_for, list_tags
from deepspeed.checkpoint.tag_agreement import compare_tags, resolve_tag
from deepspeed.errors import CheckpointError, CheckpointNotFoundError
from tests.unit.checkpoint.thread_ranks import ThreadRanks, run_threads, use_thread_ranks


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    for tag in ("step10", "step2", "other"):
        (tmp_path / tag).mkdir()
        (tmp_path / tag / "manifest.json").touch()
    (tmp_path / "unfinished").mkdir()
    (tmp_path / ".step3.writing-0123456789abcdef").mkdir()
    (tmp_path / ".step3.writing-0123456789abcdef" / "manifest.json").touch()
    (tmp_path / "latest").write_text("step2")
    return tmp_path


def test_tags_are_listed_with_numbers_counted(saves: Path) -> None:
    assert list_tags(saves) == ["other", "step2", "step10"]
    assert list_tags(saves / "nowhere") == []


def test_latest_names_the_tag_and_a_given_tag_goes_first(saves: Path) -> None:
    assert resolve_tag(saves) == "step2"
    assert resolve_tag(saves, "step10") == "step10"


@pytest.mark.parametrize("content", ["step2\n", " step2 "])
def test_white_space_around_the_tag_does_no_harm(saves: Path, content: str) -> None:
    (saves / "latest").write_text(content)
    assert resolve_tag(saves) == "step2"


def test_without_latest_there_is_no_tag_and_no_error(saves: Path) -> None:
    (saves / "latest").unlink()
    assert resolve_tag(saves) is None
    assert resolve_tag(saves / "nowhere") is None


def test_a_wrong_tag_lists_the_tags_there_are(saves: Path) -> None:
    with pytest.raises(
        CheckpointNotFoundError, match=r"'step3', which you asked for. Tags there: 'other', 'step2', 'step10'"
    ):
        resolve_tag(saves, "step3")
    with pytest.raises(FileNotFoundError, match="Tags there: none"):
        resolve_tag(saves / "nowhere", "step3")


def test_a_dangling_latest_says_that_latest_names_it(saves: Path) -> None:
    (saves / "latest").write_text("gone")
    with pytest.raises(CheckpointNotFoundError, match="'gone', which the file 'latest' names"):
        resolve_tag(saves)


@pytest.mark.parametrize(
    ("content", "what"),
    [(b"", "is empty"), (b" \n", "is empty"), (b"../../etc", "holds '../../etc'"), (b"\xff\xfe\x00", "can be no tag")],
)
def test_a_damaged_latest_is_an_error_and_leads_nowhere(saves: Path, content: bytes, what: str) -> None:
    (saves / "latest").write_bytes(content)
    with pytest.raises(CheckpointNotFoundError) as caught:
        resolve_tag(saves)
    assert str(saves / "latest") in str(caught.value)
    assert what in str(caught.value)
    assert str(caught.value).endswith("Tags there: 'other', 'step2', 'step10'. Give one of them as tag, or another folder.")


def test_a_folder_called_latest_is_an_error_with_a_cure(saves: Path) -> None:
    (saves / "latest").unlink()
    (saves / "latest").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"latest cannot be read: Is a directory. Tags there: .*Give one"):
        resolve_tag(saves)
    assert resolve_tag(saves, "step2") == "step2"


def test_the_folder_of_a_tag_in_place_of_the_one_above_is_settled_apart(
    saves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cure = f"is itself the folder of a tag: give the folder above it, {saves}, and tag 'step2'."
    assert cure in hint_for(saves / "step2")
    with pytest.raises(CheckpointNotFoundError, match=re.escape(cure)):
        resolve_tag(saves / "step2", "step2")
    with pytest.raises(CheckpointNotFoundError, match=re.escape(cure)):
        open_checkpoint(saves / "step2")
    monkeypatch.chdir(saves / "step2")
    assert cure in hint_for(".")


def test_a_file_in_place_of_the_folder_is_settled_apart(saves: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="latest is a file: give the folder that holds the tags"):
        resolve_tag(saves / "latest")
    with pytest.raises(CheckpointNotFoundError, match="latest is a file: give the folder that holds the tags"):
        resolve_tag(saves / "latest", "step2")
    assert hint_for(saves / "nowhere") == "Tags there: none. Give another folder."


def test_the_first_rank_decides_for_all(saves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_thread_ranks(monkeypatch)

    def body(ranks: ThreadRanks) -> Any:
        tag = ["step10", "step2", None][ranks.rank]
        return resolve_tag(saves, tag, rank=ranks.rank, world_size=3, group=ranks)

    assert run_threads(3, body) == ["step10"] * 3


@pytest.mark.parametrize("mode", ["Ignore", "Warn", "Fail"])
def test_equal_tags_pass_in_silence(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    compare_tags(["t", "t"], mode)
    assert caplog.text == ""


def test_different_tags_pass_in_silence_where_nobody_asked(caplog: pytest.LogCaptureFixture) -> None:
    compare_tags(["t", "u"], "Ignore")
    assert caplog.text == ""


def test_different_tags_warn_and_say_who_has_which(caplog: pytest.LogCaptureFixture) -> None:
    compare_tags(["t", "u", "t"], "Warn")
    assert "'t' on ranks 0, 2; 'u' on rank 1" in caplog.text
    assert len(caplog.records) == 1


def test_different_tags_fail_where_that_was_asked() -> None:
    with pytest.raises(CheckpointError, match="'t' on rank 0; 'u' on rank 1"):
        compare_tags(["t", "u"], "Fail")
