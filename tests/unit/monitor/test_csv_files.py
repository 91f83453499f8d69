"""CSV files, read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed.config.monitor import CsvMonitorConfig
from deepspeed.monitor import csvMonitor
from tests.support.monitors import EVENTS, rows


def test_csv_has_one_file_per_metric_named_after_it(tmp_path: Path) -> None:
    monitor = csvMonitor(CsvMonitorConfig(enabled=True, output_path=str(tmp_path), job_name="job"))
    monitor.write_events(EVENTS)
    assert rows(tmp_path / "job" / "Train_Samples_lr.csv") == [["step", "lr"], ["8", "0.1"], ["16", "0.05"]]
    assert rows(tmp_path / "job" / "Train_Samples_train_loss.csv") == [["step", "train loss"], ["8", "2.5"]]
    monitor.close()


def test_csv_is_continued_without_a_second_header(tmp_path: Path) -> None:
    config = CsvMonitorConfig(enabled=True, output_path=str(tmp_path), job_name="job")
    for samples in (8, 16):
        monitor = csvMonitor(config)
        monitor.write_events([("lr", 0.1, samples)])
        monitor.close()
    assert rows(tmp_path / "job" / "lr.csv") == [["step", "lr"], ["8", "0.1"], ["16", "0.1"]]


@pytest.mark.parametrize(
    ("left", "want"),
    [
        ("", [["step", "lr"], ["24", "0.1"]]),
        ("step,lr\r\n8,0.1\r\n16,0.", [["step", "lr"], ["8", "0.1"], ["16", "0."], ["24", "0.1"]]),
    ],
)
def test_csv_goes_on_in_a_new_row_behind_what_a_killed_run_left(tmp_path: Path, left: str, want: list[list[str]]) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "lr.csv").write_text(left, newline="")
    monitor = csvMonitor(CsvMonitorConfig(enabled=True, output_path=str(tmp_path), job_name="job"))
    monitor.write_events([("lr", 0.1, 24)])
    monitor.close()
    assert rows(tmp_path / "job" / "lr.csv") == want


def test_an_empty_output_path_is_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monitor = csvMonitor(CsvMonitorConfig(enabled=True))
    monitor.write_events([("lr", 1, 1)])
    monitor.close()
    assert rows(tmp_path / "DeepSpeedJobName" / "lr.csv") == [["step", "lr"], ["1", "1.0"]]
