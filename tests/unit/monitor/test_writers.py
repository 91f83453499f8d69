"""Each writer for real: files read back by other means, offline runs of wandb and Comet opened, killed runs."""

from __future__ import annotations

import csv
import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.config.monitor import CometConfig, CsvMonitorConfig, TensorBoardConfig, WandbConfig
from deepspeed.errors import MissingPackageError
from deepspeed.monitor import CometMonitor, Event, TensorBoardMonitor, WandbMonitor, csvMonitor

EVENTS: list[Event] = [
    ("Train/Samples/lr", 0.1, 8),
    ("Train/Samples/train loss", torch.tensor(2.5), 8),
    ("Train/Samples/lr", 0.05, 16),
]


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {tag: [(s.step, s.value) for s in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def run_script(body: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, in `folder`, with `folder` known as the variable FOLDER."""
    code = f"FOLDER = {str(folder)!r}\n" + textwrap.dedent(body)
    root = str(Path(__file__).parents[3])
    env = {**os.environ, "PYTHONPATH": root, "HOME": str(folder), **variables}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )


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


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    monitor = TensorBoardMonitor(TensorBoardConfig(enabled=True, output_path=str(tmp_path), job_name="job"))
    monitor.write_events(EVENTS)
    # Before the writer is closed: every call flushes. TensorBoard stores float32.
    assert scalars(tmp_path / "job") == {
        "Train/Samples/lr": [(8, pytest.approx(0.1)), (16, pytest.approx(0.05))],
        "Train/Samples/train loss": [(8, 2.5)],
    }
    monitor.close()


def test_a_killed_run_keeps_its_csv_and_tensorboard_rows(tmp_path: Path) -> None:
    done = run_script(
        """
        import os, signal
        from types import SimpleNamespace
        from deepspeed.config.monitor import CometConfig, CsvMonitorConfig, TensorBoardConfig, WandbConfig
        from deepspeed.monitor import MonitorMaster

        monitor = MonitorMaster(SimpleNamespace(
            tensorboard=TensorBoardConfig(enabled=True, output_path=FOLDER, job_name="tb"),
            csv_monitor=CsvMonitorConfig(enabled=True, output_path=FOLDER, job_name="csv"),
            wandb=WandbConfig(), comet=CometConfig(),
        ))
        for step in range(3):
            monitor.write_events([("lr", step, step)])
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert rows(tmp_path / "csv" / "lr.csv") == [["step", "lr"], ["0", "0.0"], ["1", "1.0"], ["2", "2.0"]]
    assert scalars(tmp_path / "tb") == {"lr": [(0, 0.0), (1, 1.0), (2, 2.0)]}


def wandb_records(path: Path) -> Iterator[Any]:
    """Records of an offline run: after 7 bytes, blocks of 32 KiB of parts (checksum, length, kind), as LevelDB's log has."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, nbytes, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + nbytes]
        at += 7 + nbytes
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def test_wandb_offline_keeps_the_run_and_one_row_per_step(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra 'wandb' is not installed")
    done = run_script(
        """
        from deepspeed.config.monitor import WandbConfig
        from deepspeed.monitor import WandbMonitor

        monitor = WandbMonitor(WandbConfig(enabled=True, project="p", group="g", team="t"))
        monitor.write_events([("Train/Samples/lr", 0.5, 8), ("Train/Samples/train_loss", 2.5, 8)])
        monitor.write_events([("Train/Samples/lr", 0.25, 16)])
        monitor.close()
        """,
        tmp_path,
        WANDB_MODE="offline",
        WANDB_DIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = list(wandb_records(path))
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.run_group, run.entity) == ("p", "g", "t")
    history = [record.history for record in records if record.WhichOneof("record_type") == "history"]
    found = [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in row.item} for row in history]
    assert [
        {key: value for key, value in row.items() if key in ("_step", "Train/Samples/lr", "Train/Samples/train_loss")}
        for row in found
    ] == [
        {"_step": 8, "Train/Samples/lr": 0.5, "Train/Samples/train_loss": 2.5},
        {"_step": 16, "Train/Samples/lr": 0.25},
    ]


def test_comet_offline_archives_the_points_that_were_due(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml", reason="the extra 'comet' is not installed")
    done = run_script(
        """
        from deepspeed.config.monitor import CometConfig
        from deepspeed.monitor import CometMonitor

        monitor = CometMonitor(CometConfig(
            enabled=True, online=False, project="p", experiment_name="n", samples_log_interval=20
        ))
        for step in range(1, 6):
            monitor.write_events([("lr", step / 2, 10 * step), ("loss", step, 10 * step)])
        monitor.close()
        """,
        tmp_path,
        COMET_OFFLINE_DIRECTORY=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(archive) as file:
        messages = [json.loads(line) for line in file.read("messages.json").splitlines()]
        experiment = json.loads(file.read("experiment.json"))
    metrics = [m["payload"]["metric"] for m in messages if m["type"] == "metric_msg"]
    for name, scale in (("lr", 0.5), ("loss", 1.0)):
        points = [(m["step"], m["metricValue"]) for m in metrics if m["metricName"] == name]
        assert points == [(10, scale), (30, 3 * scale), (50, 5 * scale)]
    assert experiment["project_name"] == "p"
    assert '"n"' in json.dumps(messages)


@pytest.mark.parametrize(
    ("monitor", "config", "package", "extra"),
    [
        (TensorBoardMonitor, TensorBoardConfig(enabled=True), "torch.utils.tensorboard", "tensorboard"),
        (WandbMonitor, WandbConfig(enabled=True), "wandb", "wandb"),
        (CometMonitor, CometConfig(enabled=True), "comet_ml", "comet"),
    ],
)
def test_a_missing_package_is_named_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch, monitor: Any, config: Any, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"pip install 'deepspeed\[{extra}\]'"):
        monitor(config)
