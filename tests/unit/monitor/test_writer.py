"""What all writers have in common: a missing package, a killed run."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed.config.monitor import AimConfig, CometConfig, MlflowConfig, PrometheusConfig, TensorBoardConfig, WandbConfig
from deepspeed.errors import MissingPackageError
from deepspeed.monitor import (
    AimMonitor,
    CometMonitor,
    MlflowMonitor,
    PrometheusMonitor,
    TensorBoardMonitor,
    WandbMonitor,
)
from tests.support.monitors import rows, run_script, scalars


@pytest.mark.parametrize(
    ("monitor", "config", "package", "extra"),
    [
        (TensorBoardMonitor, TensorBoardConfig(enabled=True), "torch.utils.tensorboard", "tensorboard"),
        (WandbMonitor, WandbConfig(enabled=True), "wandb", "wandb"),
        (CometMonitor, CometConfig(enabled=True), "comet_ml", "comet"),
        (MlflowMonitor, MlflowConfig(enabled=True), "mlflow", "mlflow"),
        (AimMonitor, AimConfig(enabled=True), "aim", "aim"),
        (PrometheusMonitor, PrometheusConfig(enabled=True), "prometheus_client", "prometheus"),
    ],
)
def test_a_missing_package_is_named_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch, monitor: Any, config: Any, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"pip install 'deepspeed\[{extra}\]'"):
        monitor(config)


def test_a_killed_run_keeps_its_csv_and_tensorboard_rows(tmp_path: Path) -> None:
    done = run_script(
        """
        import os, signal
        from deepspeed.config import DeepSpeedConfig
        from deepspeed.monitor import MonitorMaster

        monitor = MonitorMaster(DeepSpeedConfig({
            "train_batch_size": 1,
            "tensorboard": {"enabled": True, "output_path": FOLDER, "job_name": "tb"},
            "csv_monitor": {"enabled": True, "output_path": FOLDER, "job_name": "csv"},
        }))
        for step in range(3):
            monitor.write_events([("lr", step, step)])
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert rows(tmp_path / "csv" / "lr.csv") == [["step", "lr"], ["0", "0.0"], ["1", "1.0"], ["2", "2.0"]]
    assert scalars(tmp_path / "tb") == {"lr": [(0, 0.0), (1, 1.0), (2, 2.0)]}
