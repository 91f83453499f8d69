"""An offline run of Weights & Biases, opened."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.monitors import run_script


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


def test_the_run_that_the_users_code_started_gets_the_events_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra 'wandb' is not installed")
    done = run_script(
        """
        import wandb
        from deepspeed.config.monitor import WandbConfig
        from deepspeed.monitor import WandbMonitor

        mine = wandb.init(project="mine")
        monitor = WandbMonitor(WandbConfig(enabled=True))
        monitor.write_events([("lr", 0.5, 8)])
        monitor.close()
        mine.log({"after": 1.0}, step=9)
        mine.finish()
        """,
        tmp_path,
        WANDB_MODE="offline",
        WANDB_DIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    history = [record.history for record in wandb_records(path) if record.WhichOneof("record_type") == "history"]
    found = [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in row.item} for row in history]
    assert [(row["_step"], row.get("lr"), row.get("after")) for row in found] == [(8, 0.5, None), (9, None, 1.0)]
