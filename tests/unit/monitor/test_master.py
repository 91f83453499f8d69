"""MonitorMaster builds the enabled writers on rank 0 and hands every event on."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed import comm
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ArgumentError, MonitorError
from deepspeed.monitor import MonitorMaster, TensorBoardMonitor, csvMonitor


def config(folder: Path, **blocks: Any) -> DeepSpeedConfig:
    files = {name: {"enabled": True, "output_path": str(folder), "job_name": job} for name, job in blocks.items()}
    return DeepSpeedConfig({"train_batch_size": 1, **files})


def test_every_enabled_writer_gets_every_event(tmp_path: Path) -> None:
    monitor = MonitorMaster(config(tmp_path, tensorboard="tb", csv_monitor="csv"))
    assert [type(writer) for writer in monitor.writers] == [TensorBoardMonitor, csvMonitor]
    monitor.write_events([("lr", 0.5, 8)])
    monitor.close()
    monitor.write_events([("lr", 0.5, 16)])  # after the end: nowhere
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
    monitor = MonitorMaster(config(tmp_path, csv_monitor="csv"))
    monitor.write_events([("lr", 0.5, 8)])
    assert monitor.enabled
    assert monitor.writers == ()
    assert list(tmp_path.iterdir()) == []


class Closing:
    """A writer that notes its end, which may fail."""

    def __init__(self, name: str, closed: list[str], *, fails: bool = False) -> None:
        self.name, self.closed, self.fails = name, closed, fails
        self.got: list[Any] = []

    def write_events(self, event_list: Any) -> None:
        if self.fails:
            raise OSError("no room is left")
        self.got += event_list

    def close(self) -> None:
        self.closed.append(self.name)
        if self.fails:
            raise OSError(self.name)


def test_a_writer_that_cannot_close_keeps_no_other_open(tmp_path: Path) -> None:
    monitor, closed = MonitorMaster(config(tmp_path)), list[str]()
    monitor.writers = tuple(Closing(name, closed, fails=name == "b") for name in ("a", "b", "c"))
    with pytest.raises(OSError, match="b"):
        monitor.close()
    assert sorted(closed) == ["a", "b", "c"]


def test_a_writer_that_fails_is_left_out_and_the_others_and_training_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitor, closed = MonitorMaster(config(tmp_path)), list[str]()
    first, broken, last = (Closing(name, closed, fails=name == "b") for name in ("a", "b", "c"))
    monitor.writers = (first, broken, last)
    for samples in (8, 16):
        monitor.write_events([("lr", torch.tensor(0.5), samples)])
    assert first.got == last.got == [("lr", 0.5, 8), ("lr", 0.5, 16)]
    assert (monitor.writers, closed) == ((first, last), ["b"])
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert "Closing takes no more events (OSError: no room is left)" in record.getMessage()
    assert record.exc_info is not None  # with its traceback


def test_a_value_that_is_no_number_is_the_callers_error(tmp_path: Path) -> None:
    monitor = MonitorMaster(config(tmp_path, csv_monitor="csv"))
    with pytest.raises(ArgumentError, match=r"the value of 'loss' is 'much'; needed one number.* Convert it first"):
        monitor.write_events([("loss", "much", 8)])  # type: ignore[list-item]
    assert len(monitor.writers) == 1  # it is not the writer's fault
    monitor.close()


@pytest.mark.parametrize("block", ["csv_monitor", "tensorboard"])
def test_a_folder_that_cannot_be_made_is_an_error_with_its_block_and_a_cure(tmp_path: Path, block: str) -> None:
    (tmp_path / "file").touch()
    blocks = {block: {"enabled": True, "output_path": str(tmp_path / "file")}}
    with pytest.raises(MonitorError, match=rf"'{block}', which cannot start \(.*file.*needed.*set {block}.enabled to false"):
        MonitorMaster(DeepSpeedConfig({"train_batch_size": 1, **blocks}))


def test_a_writer_that_cannot_start_leaves_no_other_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client", reason="the extra 'prometheus' is not installed")
    closed = list[str]()
    monkeypatch.setattr(csvMonitor, "close", lambda self: closed.append("csv"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        blocks = {"csv_monitor": {"enabled": True}, "prometheus": {"enabled": True, "port": other.getsockname()[1]}}
        monkeypatch.chdir(tmp_path)
        with pytest.raises(MonitorError, match="cannot listen there"):
            MonitorMaster(DeepSpeedConfig({"train_batch_size": 1, **blocks}))
    assert closed == ["csv"]
