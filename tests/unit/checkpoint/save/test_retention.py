from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint import list_tags, open_checkpoint
from deepspeed.checkpoint.disk.folders import clean
from deepspeed.checkpoint.disk.storage import Storage
from deepspeed.checkpoint.save.retention import KeepRules, SavedTag, remove_superseded, saved_tags, superseded
from tests.unit.checkpoint.faulty_storage import Refusing, killed_at
from tests.unit.checkpoint.tool_checkpoints import save

_saved = st.lists(
    st.builds(
        SavedTag,
        tag=st.text("abcdef", min_size=1, max_size=3),
        saved_at=st.integers(0, 30).map(lambda second: f"2026-01-01T00:00:{second:02}+00:00"),
        step=st.integers(0, 50),
    ),
    unique_by=lambda each: each.tag,
    max_size=12,
)
_number = st.none() | st.integers(1, 8)
_rules = st.builds(KeepRules, last=_number, every=_number)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def _steps(*steps: int) -> list[SavedTag]:
    """Saved in this order, one a second."""
    return [SavedTag(f"{step}@{n}", f"2026-01-01T00:00:{n:02}+00:00", step) for n, step in enumerate(steps)]


def _left(saved: list[SavedTag], rules: KeepRules) -> list[int]:
    gone = superseded(saved, rules)
    return [each.step for each in saved if each.tag not in gone]


def _run_to_its_end(body: Callable[[], object]) -> bool:
    """Run `body` in a child process; whether it came to its end."""
    child = os.fork()
    if child == 0:
        body()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@given(_saved, _rules, st.data())
def test_what_is_protected_always_stays(saved: list[SavedTag], rules: KeepRules, data: st.DataObject) -> None:
    tags = [each.tag for each in saved]
    protected = data.draw(st.sets(st.sampled_from(tags))) if tags else set()
    assert not set(superseded(saved, rules, protected)) & protected


@given(_saved, _rules)
def test_the_newest_always_stay_and_no_other_than_milestones_do(saved: list[SavedTag], rules: KeepRules) -> None:
    gone = superseded(saved, rules)
    by_age = sorted(saved, key=lambda each: (each.saved_at, each.step, each.tag))
    if rules.last is None and rules.every is None:
        assert gone == []
        return
    number = rules.last or 1
    assert not set(gone) & {each.tag for each in by_age[-number:]}
    if rules.every is None:
        assert len(saved) - len(gone) == min(number, len(saved))
    else:
        assert len(saved) - len(gone) <= number + len({each.step // rules.every for each in saved})


@given(_saved, _rules)
def test_deciding_again_after_the_removal_removes_nothing(saved: list[SavedTag], rules: KeepRules) -> None:
    gone = superseded(saved, rules)
    assert superseded([each for each in saved if each.tag not in gone], rules) == []


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=30, unique=True).map(sorted), st.integers(1, 5), st.integers(1, 60)
)
def test_removing_after_every_save_keeps_what_removing_at_the_end_would(steps: list[int], last: int, every: int) -> None:
    rules = KeepRules(last, every)
    there: list[SavedTag] = []
    for each in _steps(*steps):
        there.append(each)
        gone = superseded(there, rules)
        there = [other for other in there if other.tag not in gone]
    assert [each.step for each in there] == _left(_steps(*steps), rules)


def test_the_last_few_and_one_of_every_hundred_steps() -> None:
    assert _left(_steps(*range(50, 501, 50)), KeepRules(2, 100)) == [100, 200, 300, 400, 450, 500]


def test_one_of_every_hundred_steps_where_saves_do_not_meet_the_hundreds() -> None:
    assert _left(_steps(*range(30, 331, 30)), KeepRules(1, 100)) == [120, 210, 300, 330]


def test_after_a_return_to_an_older_step_the_abandoned_ones_are_the_older() -> None:
    assert _left(_steps(90, 100, 50, 60), KeepRules(last=2)) == [50, 60]


def test_older_checkpoints_are_removed_and_the_rest_loads(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, f"step{step}", global_steps=step)
        remove_superseded(tmp_path, f"step{step}", KeepRules(last=2), Storage())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step4", "step5"]
    assert open_checkpoint(tmp_path).state["global_steps"] == 5


def test_the_latest_stays_though_it_is_older_than_the_newest(tmp_path: Path) -> None:
    for step in range(1, 5):
        save(tmp_path, f"step{step}", global_steps=step)
    (tmp_path / "latest").write_text("step1")
    assert remove_superseded(tmp_path, "step4", KeepRules(last=1), Storage()) == ["step2", "step3"]


def test_folders_with_files_of_the_user_and_other_layouts_stay(tmp_path: Path) -> None:
    for step in range(1, 4):
        save(tmp_path, f"step{step}", global_steps=step)
    (tmp_path / "step1" / "keep").write_text("my best")
    other = tmp_path / "original"
    other.mkdir()
    (other / "mp_rank_00_model_states.pt").write_bytes(b"")
    (tmp_path / "link").symlink_to("step2")
    assert remove_superseded(tmp_path, "step3", KeepRules(last=1), Storage()) == ["step2"]
    assert list_tags(tmp_path) == ["original", "step1", "step3"]


def test_a_manifest_that_cannot_be_read_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, "a")
    save(tmp_path, "b")
    (tmp_path / "a" / "manifest.json").write_text("{")
    assert [each.tag for each in saved_tags(tmp_path)] == ["b"]
    assert remove_superseded(tmp_path, "b", KeepRules(last=1), Storage()) == []
    assert "its checkpoint is passed over" in caplog.text


def test_a_refusal_of_the_system_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, "a")
    save(tmp_path, "b")
    storage = Refusing(lambda name, path: name == "rename" and path.name == "a")
    assert remove_superseded(tmp_path, "b", KeepRules(last=1), storage) == []
    assert "could not remove" in caplog.text
    assert list_tags(tmp_path) == ["a", "b"]


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint_or_none(tmp_path: Path) -> None:
    states = set()
    for operation in range(6):
        folder = tmp_path / str(operation)
        save(folder, "a")
        save(folder, "b")
        is_done = _run_to_its_end(
            lambda at=operation, folder=folder: remove_superseded(folder, "b", KeepRules(last=1), killed_at(at))
        )
        there = "a" in list_tags(folder)
        if there:
            open_checkpoint(folder, "a")  # with every hash
        clean(folder, Storage())
        assert sorted(path.name for path in folder.iterdir()) == (["a"] if there else []) + ["b", "latest"]
        states.add((is_done, there))
    assert states == {(False, True), (False, False), (True, False)}


def test_saves_within_one_second_go_by_their_order_whatever_their_names(tmp_path: Path) -> None:
    for tag in ("z", "y", "x", "w"):
        save(tmp_path, tag)
    remove_superseded(tmp_path, "w", KeepRules(last=2), Storage())
    assert list_tags(tmp_path) == ["w", "x"]
