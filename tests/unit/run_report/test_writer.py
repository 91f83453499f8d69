"""What the writer writes, the reader reads: every kind, every value."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepspeed import run_log
from deepspeed.run_log import RunLogWriter
from deepspeed.run_report import read_run
from deepspeed.run_report.lines import record_of

_WRITTEN: list[Any] = [
    run_log.Start(
        "1.0", 0, 2, "here", 7, "cpu", {"data": 2}, "Net", 10, {"train_batch_size": 4}, None, 1, {"weights": 40}, 3
    ),
    run_log.Step(4, 16, 0.5, [0.1, 0.2], 1.5, 8.0, 1, 0.25, 64.0, 1e9, 0.4, {"aux": 0.75}),
    run_log.RankStep(4, 100, 50, 60, {"forward": 0.1}, {"all_reduce": run_log.CommSums(2, 8, 0.01)}, 0.02),
    run_log.Experts(4, {"mlp": [0.25, 0.75]}),
    run_log.Schedule("1f1b", 1, 1, "stage 0  F0 B0", [(0, 0.0, 1.0, "F", 0), (0, 1.0, 3.0, "B", 0)], 0.0),
    run_log.Checkpoint("save", "three", 3, 0.1, 500, is_async=True),
    run_log.Profile(4, [run_log.ProfileRow("Net", 0, 10, 20, 40, 0.1, 1.0)]),
    run_log.End(4, "done"),
]


def test_every_value_of_every_kind_arrives(tmp_path: Path) -> None:
    writer = RunLogWriter(tmp_path, 0, clock_seconds=lambda: 1234.5)
    for record in _WRITTEN:
        writer.write(record)
    writer.close()
    run = read_run(tmp_path)
    assert (run.unread, run.unknown_kinds, run.cut_off) == ((), {}, ())
    assert [attempt.ranks[0].count for attempt in run.attempts] == [len(_WRITTEN)]
    for written, line in zip(_WRITTEN, writer.path.read_bytes().splitlines(), strict=True):
        read = record_of(line)
        assert isinstance(read, type(written))
        assert _plain(asdict(read)) == _plain({**asdict(written), "time": 1234.5})


def test_the_kinds_written_are_the_kinds_read() -> None:
    assert [type(record).kind for record in _WRITTEN] == list(run_log.KINDS)


def _plain(value: Any) -> Any:
    """With tuples as lists."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def test_a_run_that_appends_after_a_cut_line_is_read(tmp_path: Path) -> None:
    writer = RunLogWriter(tmp_path, 0, clock_seconds=lambda: 1.0)
    writer.write(_WRITTEN[0])
    writer.close()
    with (tmp_path / run_log.file_name(0)).open("a") as file:
        file.write('{"kind":"st')
    again = RunLogWriter(tmp_path, 0, clock_seconds=lambda: 2.0)
    again.write(_WRITTEN[0])
    again.close()
    run = read_run(tmp_path)
    assert len(run.attempts) == 2
    assert [each.line for each in run.unread] == [2]
    assert run.cut_off == ()
