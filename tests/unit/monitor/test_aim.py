"""Runs in an Aim repository, read back through Aim's own SDK. The package is large: the usual extras do not have it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.monitors import run_script

pytest.importorskip("aim", reason="the extra 'aim' is not installed")

INDEX = """
    import aim
    from aim.sdk.index_manager import RepoIndexManager

    repo = aim.Repo(FOLDER)
    manager = RepoIndexManager.get_index_manager(repo)
    for run_hash in repo.list_all_runs():
        manager.index(run_hash)
"""
"""What `aim up` does first with runs that it does not know yet; readers look at what is indexed."""

READ = """
    import json
    import aim

    found = []
    for run in aim.Repo(FOLDER).iter_runs():
        metrics = {}
        for metric in run.metrics():
            frame = metric.dataframe().sort_values("step")
            metrics[metric.name] = [(int(step), repr(float(value))) for step, value in zip(frame["step"], frame["value"])]
        found.append({"hash": run.hash, "experiment": run.experiment, "active": run.active, "metrics": metrics})
    print(json.dumps(found))
"""

WRITE = """
    import os, signal, time
    from deepspeed.config.monitor import AimConfig
    from deepspeed.monitor import AimMonitor

    def monitor(**keys):
        return AimMonitor(AimConfig(enabled=True, repo=FOLDER, **keys))
"""


def stored(folder: Path) -> list[dict[str, Any]]:
    for body in (INDEX, READ):
        done = run_script(body, folder)
        assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_run_has_its_experiment_and_every_event_and_nothing_else(tmp_path: Path) -> None:
    done = run_script(
        WRITE
        + """
    own = monitor(experiment="e")
    own.write_events([("Train/Samples/lr", 0.5, 8), ("Train/Samples/train loss", 2.5, 8)])
    own.write_events([("Train/Samples/lr", 0.25, 16)])
    own.close()
    """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (found,) = stored(tmp_path)
    assert found["experiment"] == "e"
    assert not found["active"]
    assert found["metrics"] == {"Train/Samples/lr": [[8, "0.5"], [16, "0.25"]], "Train/Samples/train loss": [[8, "2.5"]]}


def test_a_run_is_continued_by_its_hash(tmp_path: Path) -> None:
    done = run_script(
        WRITE
        + """
    own = monitor()
    own.write_events([("lr", 0.5, 8)])
    own.close()
    again = monitor(run_hash=own.run.hash)
    again.write_events([("lr", 0.25, 16)])
    again.close()
    """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (found,) = stored(tmp_path)
    assert (found["experiment"], found["metrics"]) == ("deepspeed", {"lr": [[8, "0.5"], [16, "0.25"]]})


def test_a_killed_run_keeps_the_events_that_aim_had_written(tmp_path: Path) -> None:
    done = run_script(
        WRITE
        + """
    own = monitor()
    own.write_events([("lr", 0.5, 8)])
    os.kill(os.getpid(), signal.SIGKILL)
    """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    (found,) = stored(tmp_path)
    assert found["metrics"] == {"lr": [[8, "0.5"]]}
