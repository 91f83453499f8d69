"""Runs in a database file, read back through MLflow's own client. The package is large: the usual extras do not have it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.monitors import run_script

pytest.importorskip("mlflow", reason="the extra 'mlflow' is not installed")

QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}

READ = """
    import json
    from mlflow import MlflowClient

    client = MlflowClient("sqlite:///runs.db")
    found = []
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]):
            metrics = {
                key: [(m.step, repr(m.value)) for m in client.get_metric_history(run.info.run_id, key)]
                for key in run.data.metrics
            }
            found.append({
                "experiment": experiment.name, "name": run.info.run_name, "status": run.info.status, "metrics": metrics,
                "tags": {key: value for key, value in run.data.tags.items() if not key.startswith("mlflow.")},
            })
    print(json.dumps(found))
"""

WRITE = """
    import os, signal
    from deepspeed.config.monitor import MlflowConfig
    from deepspeed.monitor import MlflowMonitor

    def monitor(**keys):
        return MlflowMonitor(MlflowConfig(enabled=True, tracking_uri="sqlite:///runs.db", **keys))
"""


def run(body: str, folder: Path, **variables: str) -> Any:
    return run_script(WRITE + body, folder, **QUIET, **variables)


def stored(folder: Path) -> list[dict[str, Any]]:
    done = run_script(READ, folder, **QUIET)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_run_has_its_names_its_tags_and_every_event(tmp_path: Path) -> None:
    done = run(
        """
    own = monitor(experiment="e", run_name="n", tags={"host": "here"})
    own.write_events([("Train/Samples/lr", 0.5, 8), ("Train/Samples/loss [mean]", float("nan"), 8)])
    own.write_events([("Train/Samples/lr", 0.25, 16)])
    own.close()
    """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (found,) = stored(tmp_path)
    assert found == {
        "experiment": "e",
        "name": "n",
        "status": "FINISHED",
        "tags": {"host": "here"},
        "metrics": {"Train/Samples/lr": [[8, "0.5"], [16, "0.25"]], "Train/Samples/loss _mean_": [[8, "nan"]]},
    }


def test_a_killed_run_keeps_its_events_and_is_continued_by_its_id(tmp_path: Path) -> None:
    done = run(
        """
    own = monitor(run_name="first")
    own.write_events([("lr", 0.5, 8), ("lr", 0.25, 16)])
    print(own.run_id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    (found,) = stored(tmp_path)
    assert (found["status"], found["metrics"]) == ("RUNNING", {"lr": [[8, "0.5"], [16, "0.25"]]})
    done = run(
        f"""
    own = monitor(run_id={done.stdout.split()[-1]!r}, run_name="again", tags={{"t": "u"}}, experiment="not looked at")
    own.write_events([("lr", 0.125, 24)])
    own.close()
    """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (found,) = stored(tmp_path)
    assert (found["experiment"], found["name"], found["tags"]) == ("deepspeed", "again", {"t": "u"})
    assert (found["status"], found["metrics"]) == ("FINISHED", {"lr": [[8, "0.5"], [16, "0.25"], [24, "0.125"]]})


def test_more_events_than_one_request_takes_all_arrive(tmp_path: Path) -> None:
    done = run(
        """
    own = monitor()
    own.write_events([("lr", number, number) for number in range(2500)])
    own.close()
    """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (found,) = stored(tmp_path)
    assert [step for step, _ in found["metrics"]["lr"]] == list(range(2500))


def test_the_run_that_the_users_code_started_is_neither_used_nor_ended(tmp_path: Path) -> None:
    done = run(
        """
    import mlflow
    mlflow.set_tracking_uri("sqlite:///runs.db")
    mlflow.set_experiment("users")
    mlflow.start_run(run_name="users")
    own = monitor(run_name="ours")
    own.write_events([("lr", 0.5, 8)])
    own.close()
    mlflow.log_metric("acc", 1.0, step=3)
    """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = {run["name"]: (run["experiment"], run["metrics"]) for run in stored(tmp_path)}
    assert found == {"users": ("users", {"acc": [[3, "1.0"]]}), "ours": ("deepspeed", {"lr": [[8, "0.5"]]})}


def test_a_store_that_is_lost_is_told_once_and_training_goes_on(tmp_path: Path) -> None:
    done = run(
        """
    import pathlib
    own = monitor()
    own.write_events([("lr", 0.5, 8)])
    pathlib.Path("runs.db").write_bytes(b"no database" * 1000)
    own.write_events([("lr", 0.25, 16)])
    own.write_events([("lr", 0.125, 24)])
    own.close()
    print("trained on")
    """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "trained on" in done.stdout
    assert done.stderr.count("takes no events from sample 16 on") == 1
    assert "restart with mlflow.run_id" in done.stderr


def test_a_store_that_cannot_be_reached_is_an_error_at_the_start(tmp_path: Path) -> None:
    done = run_script(
        """
        from deepspeed.config.monitor import MlflowConfig
        from deepspeed.monitor import MlflowMonitor

        MlflowMonitor(MlflowConfig(enabled=True, tracking_uri="http://127.0.0.1:9"))  # nobody listens at this port
        """,
        tmp_path,
        MLFLOW_HTTP_REQUEST_MAX_RETRIES="1",
        **QUIET,
    )
    assert done.returncode == 1
    assert "127.0.0.1" in done.stderr.splitlines()[-1]
