"""The command `ds_elastic`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepspeed.elasticity.command import main

BLOCK = {"version": 0.1, "enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [3, 7], "max_gpus": 20}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"elasticity": BLOCK}))
    return path


def test_the_report(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["-c", str(file)])
    rule = "-" * 42
    block = json.dumps(BLOCK, indent=4, sort_keys=True)
    assert capsys.readouterr().out == (
        f"{rule}\nElasticity config:\n{rule}\n{block}\n{rule}\nCalculated results:\n{rule}\n"
        "final_batch_size .... 84\nvalid_gpus .......... [1, 2, 3, 4, 6, 7, 12, 14]\n"
    )


def test_the_report_for_a_world_size_has_the_micro_batch(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--config", str(file), "--world-size", "4"])
    out = capsys.readouterr().out
    assert "Calculated results for world size 4:" in out
    assert out.endswith("micro_batch_size .... 7\n")


def test_no_batch_is_status_1_with_the_reason(file: Path) -> None:
    with pytest.raises(SystemExit, match="ds_elastic: 5 data-parallel ranks"):
        main(["-c", str(file), "-w", "5"])
