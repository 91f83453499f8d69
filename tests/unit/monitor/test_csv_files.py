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


def test_of_the_rows_before_only_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lr.csv").write_text("step,lr\r\n8,0.5\r\n")
    monkeypatch.delattr(Path, "read_bytes")
    monitor = csvMonitor(CsvMonitorConfig(enabled=True, output_path=str(tmp_path), job_name=""))
    monitor.write_events([("lr", 0.25, 16)])
    monitor.close()
    assert rows(tmp_path / "lr.csv") == [["step", "lr"], ["8", "0.5"], ["16", "0.25"]]


def test_two_metrics_never_share_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = csvMonitor(CsvMonitorConfig(enabled=True, output_path=str(tmp_path), job_name=""))
    for samples in (8, 16):
        monitor.write_events([("my/loss", 1.0, samples), ("my loss", 2.0, samples)])
    monitor.close()
    assert rows(tmp_path / "my_loss.csv") == [["step", "loss"], ["8", "1.0"], ["16", "1.0"]]
    (other,) = [path for path in tmp_path.iterdir() if path.name != "my_loss.csv"]
    assert rows(other) == [["step", "my loss"], ["8", "2.0"], ["16", "2.0"]]
    assert caplog.text.count(f"'my loss' goes to {other.name}") == 1


def test_an_empty_output_path_is_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monitor = csvMonitor(CsvMonitorConfig(enabled=True))
    monitor.write_events([("lr", 1, 1)])
    monitor.close()
    assert rows(tmp_path / "DeepSpeedJobName" / "lr.csv") == [["step", "lr"], ["1", "1.0"]]
