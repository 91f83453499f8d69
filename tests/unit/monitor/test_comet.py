"""An offline experiment of Comet, opened."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.monitors import run_script


def _archive(folder: Path) -> Path:
    """The one experiment that was written offline."""
    (archive,) = folder.glob("*.zip")
    return archive


def _messages(folder: Path) -> list[dict[str, Any]]:
    with zipfile.ZipFile(_archive(folder)) as file:
        return [json.loads(line) for line in file.read("messages.json").splitlines()]


def _metrics(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"]


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
    messages = _messages(tmp_path)
    metrics = _metrics(messages)
    with zipfile.ZipFile(_archive(tmp_path)) as file:
        experiment = json.loads(file.read("experiment.json"))
    for name, scale in (("lr", 0.5), ("loss", 1.0)):
        points = [(m["step"], m["metricValue"]) for m in metrics if m["metricName"] == name]
        assert points == [(10, scale), (30, 3 * scale), (50, 5 * scale)]
    assert experiment["project_name"] == "p"
    assert '"n"' in json.dumps(messages)


def test_the_experiment_that_the_users_code_started_gets_the_points_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml", reason="the extra 'comet' is not installed")
    done = run_script(
        """
        import comet_ml
        from deepspeed.config.monitor import CometConfig
        from deepspeed.monitor import CometMonitor

        mine = comet_ml.start(online=False)
        monitor = CometMonitor(CometConfig(enabled=True, online=False))
        monitor.write_events([("lr", 0.5, 8)])
        monitor.close()
        mine.log_metric("after", 1.0, step=9)
        mine.end()
        """,
        tmp_path,
        COMET_OFFLINE_DIRECTORY=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    metrics = _metrics(_messages(tmp_path))
    found = {m["metricName"]: (m["step"], m["metricValue"]) for m in metrics if m["metricName"] in ("lr", "after")}
    assert found == {"lr": (8, 0.5), "after": (9, 1.0)}
