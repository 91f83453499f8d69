"""Frames of `deepspeed top` as text, at the two widths that terminals have."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from deepspeed.run_report import RunReader, read_run
from deepspeed.run_report.top import frame, silence, sparkline
from deepspeed.run_report.top_command import main, watch
from tests.support import run_logs
from tests.support.run_logs import BEGIN, end, rank_step, start, step, write

_ASCII = "_.-=+*%#"


def _text(folder: Path, now: float, width: int = 80) -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")  # a terminal that has no blocks
    console = Console(file=file, width=width, legacy_windows=False)
    console.print(frame(read_run(folder), now))
    file.flush()
    assert isinstance(file.buffer, io.BytesIO)
    return [line.rstrip() for line in file.buffer.getvalue().decode("ascii").splitlines()]


def _run(folder: Path, steps: int = 8) -> Path:
    for rank in (0, 1):
        waited = 0.4 if rank == 0 else 0.02
        records = [
            rank_step(at, BEGIN + at, host_bytes=(3 + rank) * 1e9, waited_seconds=waited) for at in range(1, steps + 1)
        ]
        told = [
            step(at, BEGIN + at, loss=9.0 - at, grad_norm=0.5, loss_scale=1024.0, skipped=1, samples_per_second=64.0)
            for at in range(1, steps + 1)
        ]
        save = {"kind": "checkpoint", "time": BEGIN + 4, "action": "save", "tag": "global_step4", "step": 4, "seconds": 0.5,
                "nbytes": 1.5e9}  # fmt: skip
        write(folder, {rank: [start(rank, host_bytes=1e9), save, *(told if rank == 0 else []), *records]})
    return folder


def test_a_frame_fits_a_narrow_terminal(tmp_path: Path) -> None:
    assert _text(_run(tmp_path / "job"), BEGIN + 10) == [
        "job, GPT with 124 M parameters, 2 ranks, cpu                      training, 10 s",
        "step 8   loss 1   lr 0.001   grad norm 0.5   scale 1024   skipped 1",
        "per step 500 ms   samples/s 64",
        "",
        "loss                8  #%*+=-._  1",
        "samples/s          64  ########  64",
        "",
        "rank  memory, of the plan    waits, of the time     last record",
        "   0   2.00 GB ####            40.0 % #####              step 8",
        "   1   3.00 GB ######          2.00 %                    step 8",
        "rank 1 is waited for",
        "",
        "last checkpoint: global_step4, 6 s ago, held up training for 500 ms, 1.50 GB of",
        "rank 0",
        "last record: 2 s ago",
    ]


def test_a_frame_uses_a_wide_terminal(tmp_path: Path) -> None:
    lines = _text(_run(tmp_path / "job", steps=100), BEGIN + 101, width=120)
    assert lines[0].endswith("training, 1 min 41 s")
    assert len(lines[0]) == 120
    assert max(map(len, lines)) <= 120
    (loss,) = [line for line in lines if line.startswith("loss")]
    assert len(loss) > 100


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_no_frame_of_a_large_run_is_wider_than_its_terminal(tmp_path: Path, width: int) -> None:
    lines = _text(run_logs.whole(tmp_path, steps=200, ranks=20), BEGIN + 1000, width)
    assert max(map(len, lines)) <= width
    assert any("and 4 more ranks" in line for line in lines)


def test_a_run_that_says_nothing_for_long_is_called_so(tmp_path: Path) -> None:
    assert _text(_run(tmp_path), BEGIN + 48)[-1] == "no record for 40 s (a step takes 1.00 s): hung, saving, or killed?"


def test_slow_steps_are_given_their_time(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, {0: [start(0, world_size=1), *(step(at, BEGIN + 60 * at) for at in range(5))]}))
    assert silence(run, BEGIN + 300) == (60.0, 60.0)
    assert _text(tmp_path, BEGIN + 300)[-1] == "last record: 1 min ago"


def test_a_failed_run_shows_its_error(tmp_path: Path) -> None:
    write(
        tmp_path / "job",
        {0: [start(0, world_size=1), step(1, BEGIN), end(1, BEGIN + 1, "Traceback ...\nOverflowError: too far\n")]},
    )
    lines = _text(tmp_path / "job", BEGIN + 2)
    assert lines[0].endswith("failed, 1 s")
    assert lines[1] == "OverflowError: too far"


def test_a_run_that_has_only_begun_says_what_is_missing(tmp_path: Path) -> None:
    lines = _text(write(tmp_path, {0: [start(0)]}), BEGIN + 1)
    assert "No step is reported yet." in lines
    assert "No rank has told its memory yet." in lines
    assert "last checkpoint: none yet" in lines


def test_ranks_without_a_record_and_ranks_behind_are_named(tmp_path: Path) -> None:
    write(
        tmp_path,
        {0: [start(0, world_size=4), rank_step(9, BEGIN + 30)], 1: [start(1, world_size=4), rank_step(2, BEGIN + 5)]},
    )
    lines = _text(tmp_path, BEGIN + 31)
    assert any(line.startswith("   1") and line.endswith("25 s behind") for line in lines)
    assert "without a record: ranks 2, 3" in lines


def test_a_sparkline_shows_the_shape() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8, _ASCII) == "_.-=+*%#"
    assert sparkline([5.0, 5.0], 8, _ASCII) == "++"
    assert sparkline([99.0, 100.0], 8, _ASCII, from_zero=True) == "##"
    assert len(sparkline(list(range(1000)), 30)) == 30


def test_watching_reads_on_until_the_run_is_done(tmp_path: Path) -> None:
    write(tmp_path, {0: [start(0, world_size=1)]})
    reader = RunReader(tmp_path)
    reader.read_more()
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        write(tmp_path, {0: [step(len(naps), BEGIN) if len(naps) < 3 else end(2, BEGIN)]})

    file = io.StringIO()
    watch(reader, Console(file=file, width=80), 0.5, clock=lambda: BEGIN, sleep=sleep)
    assert naps == [0.5, 0.5, 0.5]
    assert "step 2" in file.getvalue()
    assert "done" in file.getvalue()


def test_the_command_prints_a_frame_or_says_where_to_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(_run(tmp_path / "job")), "--once"]) == 0
    assert "step 8" in capsys.readouterr().out
    assert main([str(tmp_path)]) == 2
    assert "but in" in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "soon"])
def test_an_interval_that_no_clock_has_is_refused(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["runs", "--interval", interval])
    assert "--interval" in capsys.readouterr().err
