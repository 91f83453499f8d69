from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepspeed.checkpoint.tools import main
from tests.unit.checkpoint.tool_checkpoints import save

_MOMENTS = {f"optimizer/w/{key}": torch.rand(2, 3) for key in ("exp_avg", "exp_avg_sq")}


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def _run(*words: object) -> int:
    return main([str(word) for word in words])


def test_weights_come_out_complete_in_the_type_asked_for(tmp_path: Path) -> None:
    save(tmp_path, "a")
    assert _run("export", tmp_path, tmp_path / "out", "--safe-serialization", "--dtype", "bf16") == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(weights) == ["head", "seen", "w"]
    assert torch.equal(weights["head"], torch.arange(6.0).view(2, 3).bfloat16())


@pytest.mark.parametrize(
    ("form", "out", "options"),
    [("universal", "b/uni", []), ("stages", "b", ["--stage", "2", "--world-size", "3", "--dtype", "bf16"])],
)
def test_a_layout_of_the_original_holds_the_same(
    form: str, out: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "a", "t", _MOMENTS)
    assert _run("export", tmp_path / "a", tmp_path / out, "--to", form, *options) == 0
    status = _run("diff", tmp_path / "a", tmp_path / "b")
    assert status == 0, capsys.readouterr().out
    assert _run("verify", tmp_path / "b") == 0


def test_an_option_of_another_form_is_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, "a")
    assert _run("export", tmp_path, tmp_path / "out", "--workers", 2) == 2
    assert "no use for --workers" in capsys.readouterr().err
    assert _run("export", tmp_path, tmp_path / "out", "--to", "stages", "--stage", 1) == 2
    assert _run("export", tmp_path, tmp_path / "out", "--dtype", "int4") == 2
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path, "a") / "rank_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    for form in ("weights", "universal"):
        assert _run("export", tmp_path, tmp_path / "out" / "t", "--to", form) == 1
        assert "rank_00000.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "out" / "t").exists()
