"""The command `deepspeed-pipeline`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.pipe.command import main


def test_a_schedule_is_drawn_with_its_idle_share_and_its_activations(capsys: pytest.CaptureFixture[str]) -> None:
    main(["draw", "--stages", "2", "--micro-batches", "3"])
    assert capsys.readouterr().out.splitlines() == [
        "stage 0  F0 F1 .  .  B0--- F2 B1--- .  B2---",
        "stage 1  .  F0 B0--- F1 B1--- F2 B2---",
        "",
        "length 12, idle 25.0% (ideal 25.0%)",
        "activations alive at most, by stage: 2, 1",
    ]


def test_costs_transfers_chunks_and_a_picture_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "draw --schedule interleaved --chunks 2 --stages 2 --micro-batches 4 --costs 2,1,1 --transfer 1 --png"
    main([*words.split(), str(tmp_path / "drawn.png")])
    assert "length 24, idle 33.3% (ideal 11.1%)" in capsys.readouterr().out
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_no_schedule_ends_with_the_reason() -> None:
    with pytest.raises(SystemExit, match="deepspeed-pipeline: schedule '1f1b' has one chunk"):
        main(["draw", "--stages", "2", "--micro-batches", "3", "--chunks", "2"])


@pytest.mark.parametrize(
    "words", ["--costs 1,2", "--costs 1,0,1", "--costs a,b,c", "--transfer -1", "--schedule best", "--chunks 0"]
)
def test_a_wrong_word_is_refused_with_the_usage(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["draw", "--stages", "2", "--micro-batches", "3", *words.split()])
    assert words.split(maxsplit=1)[0] in capsys.readouterr().err


def test_the_command_loads_no_torch() -> None:
    code = "import sys; from deepspeed.pipe.command import main; main('draw --stages 2 --micro-batches 2'.split())"
    check = f"{code}; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, check=False).returncode == 0
