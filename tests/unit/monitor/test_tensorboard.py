"""Event files, read back with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed.config.monitor import TensorBoardConfig
from deepspeed.monitor import TensorBoardMonitor
from tests.support.monitors import EVENTS, scalars


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    monitor = TensorBoardMonitor(TensorBoardConfig(enabled=True, output_path=str(tmp_path), job_name="job"))
    monitor.write_events(EVENTS)
    # Before the writer is closed: every call flushes. TensorBoard stores float32.
    assert scalars(tmp_path / "job") == {
        "Train/Samples/lr": [(8, pytest.approx(0.1)), (16, pytest.approx(0.05))],
        "Train/Samples/train loss": [(8, 2.5)],
    }
    monitor.close()


def test_steps_that_a_resumed_run_repeats_replace_the_old_ones(tmp_path: Path) -> None:
    config = TensorBoardConfig(enabled=True, output_path=str(tmp_path), job_name="job")
    for first, value in ((8, 1.0), (24, 2.0), (40, 3.0)):
        monitor = TensorBoardMonitor(config)
        for samples in range(first, first + 24, 8):
            monitor.write_events([("loss", value, samples), ("lr", value / 2, samples)])
        monitor.close()
    assert scalars(tmp_path / "job") == {
        "loss": [(8, 1.0), (16, 1.0), (24, 2.0), (32, 2.0), (40, 3.0), (48, 3.0), (56, 3.0)],
        "lr": [(8, 0.5), (16, 0.5), (24, 1.0), (32, 1.0), (40, 1.5), (48, 1.5), (56, 1.5)],
    }
