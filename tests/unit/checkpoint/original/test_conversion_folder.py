from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed.checkpoint.disk.storage import Storage
from deepspeed.checkpoint.original.writing.conversion_folder import point_to, written_aside
from deepspeed.errors import CheckpointError
from tests.unit.checkpoint.faulty_storage import NoExchange


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("storage", [Storage(), NoExchange()])
def test_a_whole_result_replaces_what_stood_there(tmp_path: Path, storage: Storage) -> None:
    for text in ("one", "two"):
        with written_aside(tmp_path / "u", storage) as working:
            (working / text).write_text(text)
            assert names(tmp_path)[0] == working.name
        assert names(tmp_path / "u") == [text]
    assert names(tmp_path) == ["u"]


def test_an_interrupted_one_is_removed_and_the_old_one_stays(tmp_path: Path) -> None:
    (tmp_path / "u").mkdir()

    def interrupted() -> None:
        with written_aside(tmp_path / "u", Storage()) as working:
            (working / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(tmp_path) == ["u"]
    assert names(tmp_path / "u") == []


def test_a_left_over_is_removed_but_not_that_of_another_output(tmp_path: Path) -> None:
    for name in (".u.converting-0123456789abcdef", ".other.converting-0123456789abcdef"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
    with written_aside(tmp_path / "u", Storage()):
        pass
    assert names(tmp_path) == [".other.converting-0123456789abcdef", "u"]


def test_two_conversions_into_one_output_do_not_mix(tmp_path: Path) -> None:
    with written_aside(tmp_path / "u", Storage()) as working:
        (working / "mine").touch()
        with (
            pytest.raises(CheckpointError, match=r"another conversion is writing .*/u "),
            written_aside(tmp_path / "u", Storage()),
        ):
            pass
    assert names(tmp_path / "u") == ["mine"]


def test_a_pointer_is_replaced_in_one_step(tmp_path: Path) -> None:
    point_to(tmp_path / "latest_universal", "a", Storage())
    point_to(tmp_path / "latest_universal", "b", Storage())
    assert (tmp_path / "latest_universal").read_bytes() == b"b"
    assert names(tmp_path) == ["latest_universal"]
