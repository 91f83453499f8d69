"""Monitors of a job: asked while it trains, after it was resumed, and when one of them cannot start."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed import comm
from deepspeed.errors import MonitorError
from deepspeed.monitor import PrometheusMonitor
from tests.support.engines import config, make_engine
from tests.support.models import Mlp, build, make_batches
from tests.support.monitors import rows, scalars
from tests.support.ranks import run_ranks


def _fetch(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def _asked(rank: int, world_size: int) -> tuple[list[str], list[float], str]:
    """(what the endpoint said after each step, the mean losses, what it said when the engine was gone)."""
    model = build(Mlp, dtype=torch.float64)
    settings = config(monitor_config={"prometheus": {"enabled": True, "job_name": "j"}})
    engine = make_engine(model, settings, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert len(engine.monitor.writers) == (1 if rank == 0 else 0)
    port = 0
    for writer in engine.monitor.writers:
        assert isinstance(writer, PrometheusMonitor)
        port = writer.port
    texts, means = [], []
    for (micro,) in make_batches(model, 2, 1, world_size):
        with torch.no_grad():
            means.append(sum(model(*batch).item() for batch in micro) / world_size)
        engine.backward(engine(*micro[rank]))
        engine.step()
        if rank == 0:
            texts.append(_fetch(port))
    engine.destroy()
    after = ""
    if rank == 0:
        try:
            _fetch(port)
        except ConnectionRefusedError:
            after = "refused"
    return texts, means, after


def test_prometheus_is_told_every_step_until_the_engine_is_destroyed() -> None:
    pytest.importorskip("prometheus_client", reason="the extra 'prometheus' is not installed")
    (texts, means, after), (no_texts, _, _) = run_ranks(_asked, 2)
    assert (len(texts), no_texts, after) == (2, [], "refused")
    for step, (text, mean) in enumerate(zip(texts, means, strict=True), start=1):
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        told = float(values['deepspeed_Train_Samples_train_loss{job="j",rank="0"}'])
        assert told == pytest.approx(mean, rel=1e-6)  # losses are summed in fp32
        assert float(values['deepspeed_samples{job="j",rank="0"}']) == 8 * step  # 4 rows on each of 2 ranks


def _taken(rank: int, world_size: int, port: int) -> tuple[str, str, int]:
    """(kind of the error, its text, the sum of a collective after it)."""
    model = build(Mlp)
    settings = config(prometheus={"enabled": True, "port": port})
    with pytest.raises(MonitorError) as raised:
        make_engine(model, settings, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    number = torch.ones(1)
    comm.all_reduce(number)
    return type(raised.value).__name__, str(raised.value), int(number)


def test_all_ranks_are_told_when_the_first_ones_monitor_cannot_start() -> None:
    pytest.importorskip("prometheus_client", reason="the extra 'prometheus' is not installed")
    with socket.create_server(("127.0.0.1", 0)) as other:
        first, second = run_ranks(_taken, 2, other.getsockname()[1])
    assert first[0] == second[0] == "MonitorError"
    assert "prometheus.port" in first[1]
    assert "rank 1: a monitor could not start on rank 0" in second[1]
    assert first[2] == second[2] == 2  # they still meet


def _resumed(rank: int, world_size: int, folder: str) -> None:
    """Three steps, a checkpoint after the second; then two steps from there."""
    model = build(Mlp, dtype=torch.float64)
    settings = config(
        csv_monitor={"enabled": True, "output_path": folder, "job_name": "csv"},
        tensorboard={"enabled": True, "output_path": folder, "job_name": "tb"},
    )
    batches = make_batches(model, 4, 1, world_size)
    engine = make_engine(model, settings, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for number, (micro,) in enumerate(batches[:3], start=1):
        engine.backward(engine(*micro[rank]))
        engine.step()
        if number == 2:
            engine.save_checkpoint(f"{folder}/checkpoints")
    engine.destroy()
    again = build(Mlp, dtype=torch.float64)
    engine = make_engine(again, settings, optimizer=torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9))
    engine.load_checkpoint(f"{folder}/checkpoints")
    for (micro,) in batches[2:]:
        engine.backward(engine(*micro[rank]))
        engine.step()
    engine.destroy()


def test_files_go_on_where_a_resumed_run_does(tmp_path: Path) -> None:
    run_ranks(_resumed, 2, str(tmp_path))
    header, *told = rows(tmp_path / "csv" / "Train_Samples_train_loss.csv")
    assert header == ["step", "train_loss"]
    assert [int(samples) for samples, _ in told] == [8, 16, 24, 24, 32]
    assert told[2] == told[3]  # the step that was done again, from the same state
    shown: dict[str, Any] = scalars(tmp_path / "tb")
    losses = shown["Train/Samples/train_loss"]
    assert [samples for samples, _ in losses] == [8, 16, 24, 32]
    kept = [float(value) for _, value in (*told[:3], told[4])]
    assert [value for _, value in losses] == pytest.approx(kept, rel=1e-6)  # TensorBoard stores fp32
