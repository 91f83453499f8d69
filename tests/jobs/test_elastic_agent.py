"""`DSElasticAgent` without our launcher: torch's rendezvous and workers, our rules."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from deepspeed.elasticity import DSElasticAgent


def _say(folder: str, fails: int) -> str:
    """What a worker does; it fails so many times first."""
    path = Path(folder, f"tries-{os.environ['RANK']}")
    tries = path.stat().st_size if path.exists() else 0
    with path.open("a") as file:
        file.write("x")
    if tries < fails:
        raise SystemExit(3)
    return f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']} {os.environ['GREETING']}"


def _run(folder: Path, fails: int, max_restarts: int) -> RunResult:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    handler = get_rendezvous_handler(
        RendezvousParameters("c10d", endpoint, "test", 1, 1, local_addr="127.0.0.1", last_call_timeout=1)
    )
    spec = WorkerSpec(
        role="test",
        local_world_size=2,
        rdzv_handler=handler,
        entrypoint=_say,
        args=(str(folder), fails),
        max_restarts=max_restarts,
        monitor_interval=0.1,
    )
    return DSElasticAgent(spec, {"GREETING": "hello"}, start_method="fork").run()


@pytest.fixture(autouse=True)
def _own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def test_workers_get_the_variables_and_their_results_come_back(tmp_path: Path) -> None:
    result = _run(tmp_path, 0, 0)
    assert result.return_values == {0: "0 of 2 hello", 1: "1 of 2 hello"}
    assert "GREETING" not in os.environ


def test_workers_that_fail_start_anew_as_often_as_is_allowed(tmp_path: Path) -> None:
    assert not _run(tmp_path, 1, 1).is_failed()
    other = tmp_path / "other"
    other.mkdir()
    assert _run(other, 9, 1).is_failed()
    assert max(len(path.read_text()) for path in other.iterdir()) == 2
