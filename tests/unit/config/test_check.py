"""The command `deepspeed-config`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed.config.check import main
from deepspeed.config.reference import reference_page


def written(folder: Path, **config: Any) -> str:
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_a_good_file_is_printed_resolved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=3)
    assert main(["check", path, "--world-size", "4"]) == 0
    resolved = json.loads(capsys.readouterr().out)
    assert resolved["train_batch_size"] == 24
    assert resolved["zero_optimization"]["reduce_bucket_size"] == 500_000_000


def test_a_bad_file_is_refused_with_every_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", written(tmp_path, train_batch_size=7, zero={}, fp16={"x": 1}), "--world-size", "2"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "3 faults in the configuration" in captured.err
    assert "2 data-parallel ranks" in captured.err


def test_without_a_world_size_three_batch_sizes_say_it(tmp_path: Path) -> None:
    path = written(tmp_path, train_batch_size=24, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=3)
    assert main(["check", path]) == 0
    assert main(["check", path, "--world-size", "3"]) == 1


@pytest.mark.parametrize("size", ["0", "-2"])
def test_a_world_size_below_one_is_a_wrong_command_line(tmp_path: Path, size: str) -> None:
    assert main(["check", written(tmp_path, train_batch_size=1), "--world-size", size]) == 2


def test_a_missing_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "nowhere.json"]) == 1
    assert "no existing file" in capsys.readouterr().err


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "DeepSpeed configuration"


def test_the_reference_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reference"]) == 0
    assert capsys.readouterr().out == reference_page()
