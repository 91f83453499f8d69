"""MonitorMaster builds the enabled writers on rank 0 and hands every event on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed import comm
from deepspeed.config.monitor import CometConfig, CsvMonitorConfig, TensorBoardConfig, WandbConfig
from deepspeed.monitor import MonitorMaster, TensorBoardMonitor, csvMonitor


def config(folder: Path, *enabled: str) -> Any:
    return SimpleNamespace(
        tensorboard=TensorBoardConfig(enabled="tensorboard" in enabled, output_path=str(folder), job_name="tb"),
        csv_monitor=CsvMonitorConfig(enabled="csv_monitor" in enabled, output_path=str(folder), job_name="csv"),
        wandb=WandbConfig(),
        comet=CometConfig(),
    )


def test_every_enabled_writer_gets_every_event(tmp_path: Path) -> None:
    monitor = MonitorMaster(config(tmp_path, "tensorboard", "csv_monitor"))
    assert [type(writer) for writer in monitor.writers] == [TensorBoardMonitor, csvMonitor]
    monitor.write_events([("lr", 0.5, 8)])
    monitor.close()
    assert (tmp_path / "csv" / "lr.csv").read_text().split() == ["step,lr", "8,0.5"]
    assert list((tmp_path / "tb").glob("events.out.tfevents.*"))


def test_nothing_enabled_writes_nothing(tmp_path: Path) -> None:
    monitor = MonitorMaster(config(tmp_path))
    monitor.write_events([("lr", 0.5, 8)])
    monitor.close()
    assert not monitor.enabled
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_are_enabled_but_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "is_initialized", lambda: True)
    monkeypatch.setattr(comm, "get_rank", lambda: 1)
    monitor = MonitorMaster(config(tmp_path, "csv_monitor"))
    monitor.write_events([("lr", 0.5, 8)])
    assert monitor.enabled
    assert monitor.writers == ()
    assert list(tmp_path.iterdir()) == []
