from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.checkpoint.disk.storage import Storage
from deepspeed.checkpoint.tools import main
from tests.unit.checkpoint.tool_checkpoints import save


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """`run(*words)` -> (exit status, standard output, standard error)."""

    def call(*words: object) -> tuple[int, str, str]:
        status = main([str(word) for word in words])
        written = capsys.readouterr()
        return status, written.out, written.err

    return call


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_ls_tells_step_ranks_stage_precision_and_which_tag_is_the_latest(tmp_path: Path, run: Any) -> None:
    save(tmp_path, "step2", global_steps=2)
    save(tmp_path, "step10", global_steps=10, zero_stage=3)
    status, out, _ = run("ls", tmp_path)
    rows = [line.split() for line in out.splitlines() if line.strip().startswith("step")]
    assert status == 0
    assert [row[:3] for row in rows] == [["step2", "2", "own"], ["step10", "10", "own"]]
    assert rows[0][5:8] == ["1", "1", "bf16"]
    assert rows[1][5:8] == ["1", "3", "bf16"]
    assert ["latest" in row for row in rows] == [False, True]


def test_ls_as_json_holds_the_same(tmp_path: Path, run: Any) -> None:
    folder = save(tmp_path, "step2")
    record = json.loads(run("ls", tmp_path, "--json")[1])
    (tag,) = record["tags"]
    assert (tag["tag"], tag["step"], tag["ranks"], tag["zero_stage"]) == ("step2", 3, 1, 1)
    assert tag["named_by"] == ["latest"]
    assert tag["nbytes"] == sum(path.stat().st_size for path in folder.iterdir())


def test_ls_shows_a_damaged_tag_beside_the_whole_ones(tmp_path: Path, run: Any) -> None:
    save(tmp_path, "bad")
    save(tmp_path, "good")
    _flip(tmp_path / "bad" / "manifest.json", 40)
    status, out, _ = run("ls", tmp_path)
    assert status == 1
    assert "DAMAGED bad" in out
    assert "good" in out


def test_ls_names_a_latest_that_points_nowhere(tmp_path: Path, run: Any) -> None:
    save(tmp_path, "step2")
    (tmp_path / "latest").write_text("step3")
    status, out, _ = run("ls", tmp_path)
    assert (status, "latest: it names 'step3', which is not there" in out) == (1, True)


def test_ls_tells_a_running_save_from_one_that_was_killed(tmp_path: Path, run: Any) -> None:
    save(tmp_path, "step2")
    left, live = tmp_path / ".a.writing-0123456789abcdef", tmp_path / ".b.writing-0123456789abcdef"
    left.mkdir()
    live.mkdir()
    lock = Storage().lock(live)
    assert lock is not None
    try:
        record = json.loads(run("ls", tmp_path, "--json")[1])
    finally:
        lock.release()
    assert [(part["name"], part["is_running"]) for part in record["left_overs"]] == [(left.name, False), (live.name, True)]


def test_show_lists_tensors_state_and_client_state(tmp_path: Path, run: Any) -> None:
    save(tmp_path, "step2", client_state={"epoch": 7, "[odd] key": torch.zeros(2)})
    status, out, _ = run("show", tmp_path)
    assert status == 0
    for text in (
        "master/w",
        "2x3",
        "optimizer/w/exp_avg",
        "head = w",
        "last_batch_iteration=2",
        "AdamW",
        "lr=0.1",
        "[odd] key",
    ):
        assert text in out


def test_show_lists_only_the_tensors_asked_for(tmp_path: Path, run: Any) -> None:
    save(tmp_path, "step2")
    record = json.loads(run("show", tmp_path / "step2", "--tensors", "master/*", "--json")[1])
    assert [(tensor["name"], tensor["shape"], tensor["fragments"]) for tensor in record["tensors"]] == [
        ("master/w", [2, 3], 1)
    ]
    assert record["client_state"] == {"epoch": 7}


def test_verify_says_whole_of_whole_checkpoints(tmp_path: Path, run: Any) -> None:
    save(tmp_path, "step1")
    save(tmp_path, "step2")
    status, out, _ = run("verify", tmp_path)
    assert status == 0
    assert [line.split()[:2] for line in out.splitlines()] == [["whole", "step1"], ["whole", "step2"]]


def test_verify_names_every_damaged_file_of_every_tag(tmp_path: Path, run: Any) -> None:
    for tag in ("a", "b", "c"):
        save(tmp_path, tag)
    _flip(tmp_path / "a" / "client_state.json", 0)
    _flip(tmp_path / "a" / "rank_00000.safetensors", 99)
    (tmp_path / "b" / "rank_00000.safetensors").unlink()
    _flip(tmp_path / "c" / "manifest.json", 200)
    status, out, _ = run("verify", tmp_path, "--json")
    faults = {tag["tag"]: [fault.split()[0] for fault in tag["faults"]] for tag in json.loads(out)["tags"]}
    assert status == 1
    assert faults == {
        "a": ["client_state.json", "rank_00000.safetensors"],
        "b": ["rank_00000.safetensors"],
        "c": ["manifest.json:"],
    }


def test_verify_notes_files_that_are_not_the_checkpoints(tmp_path: Path, run: Any) -> None:
    (save(tmp_path, "a") / "mine.txt").write_text("mine")
    status, out, _ = run("verify", tmp_path)
    assert (status, "mine.txt is not a file of the checkpoint" in out) == (0, True)


def test_verify_names_every_damaged_archive_of_stage_files(tmp_path: Path, run: Any) -> None:
    folder = tmp_path / "step1"
    folder.mkdir()
    files = ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    for file in files:
        torch.save({"values": torch.arange(1000.0)}, folder / file)
        _flip(folder / file, 2000)
    status, out, _ = run("verify", tmp_path, "--json")
    assert status == 1
    assert [fault.split(":")[0] for fault in json.loads(out)["tags"][0]["faults"]] == files


def test_diff_of_a_checkpoint_with_itself_is_nothing(tmp_path: Path, run: Any) -> None:
    save(tmp_path, "a")
    save(tmp_path, "b")
    status, out, _ = run("diff", tmp_path / "a", tmp_path / "b")
    assert status == 0
    assert "2 of 2 weights and buffers are equal to the last bit" in out
    assert out.strip().endswith("The same.")


def test_diff_tells_what_differs_and_by_how_much(tmp_path: Path, run: Any) -> None:
    changed = torch.arange(6.0).view(2, 3)
    changed[1, 2] = 5.5
    save(tmp_path, "a")
    save(tmp_path, "b", {"master/w": changed}, global_steps=4, client_state={"epoch": 8})
    status, out, _ = run("diff", tmp_path / "a", tmp_path / "b", "--json")
    record = json.loads(out)
    (tensor,) = record["tensors"]
    assert (status, record["is_same"]) == (1, False)
    assert (tensor["name"], tensor["verdict"], tensor["different_numel"]) == ("w", "values", 1)
    assert (tensor["largest_abs"], tensor["relative"]) == (0.5, 0.1)
    assert {part["path"] for part in record["state"]} == {"state.global_steps", "client_state.epoch"}


def test_diff_takes_a_tolerance_and_may_leave_the_state_out(tmp_path: Path, run: Any) -> None:
    save(tmp_path, "a")
    save(tmp_path, "b", {"master/w": torch.arange(6.0).view(2, 3) + 1e-3}, global_steps=4)
    pair = (tmp_path / "a", tmp_path / "b")
    assert run("diff", *pair, "--parameters-only")[0] == 1
    assert run("diff", *pair, "--parameters-only", "--rtol", "1e-2")[0] == 0
    assert run("diff", *pair, "--parameters-only", "--atol", "1e-4")[0] == 1
    assert run("diff", *pair, "--atol", "1e-2")[0] == 1


def test_wrong_use_has_its_own_status_and_says_what_there_is(tmp_path: Path, run: Any) -> None:
    save(tmp_path, "a")
    status, _, err = run("show", tmp_path, "--tag", "b")
    assert (status, "Tags there: 'a'" in err) == (2, True)
    assert run("ls", tmp_path / "nowhere")[0] == 2
    with pytest.raises(SystemExit) as exit_:
        run("look", tmp_path)
    assert exit_.value.code == 2
    assert run("show", tmp_path / "a", "--tag", "a")[0] == 2
    (tmp_path / "latest").unlink()
    assert run("show", tmp_path)[0] == 2


def test_opening_a_damaged_checkpoint_is_status_1(tmp_path: Path, run: Any) -> None:
    save(tmp_path, "a")
    _flip(tmp_path / "a" / "manifest.json", 40)
    status, _, err = run("show", tmp_path)
    assert (status, "does not match its own checksum" in err) == (1, True)
