"""The endpoint, asked over HTTP as Prometheus asks it."""

from __future__ import annotations

import gc
import http.client
import logging
import os
import socket
import threading
import time

import pytest

from deepspeed.config.monitor import PrometheusConfig
from deepspeed.errors import MonitorError

pytest.importorskip("prometheus_client", reason="the extra 'prometheus' is not installed")

from prometheus_client.parser import text_string_to_metric_families

from deepspeed.monitor import PrometheusMonitor
from tests.support.monitors import EVENTS


def fetch(port: int, host: str = "127.0.0.1") -> str:
    connection = http.client.HTTPConnection(host, port, timeout=20)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read().decode()
    finally:
        connection.close()


def samples(text: str) -> dict[tuple[str, str, str], float]:
    """(name, job, rank) -> value, as Prometheus' own parser reads the text."""
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert all(set(sample.labels) == {"job", "rank"} for sample in found)
    return {(sample.name, sample.labels["job"], sample.labels["rank"]): sample.value for sample in found}


def test_the_newest_value_of_each_metric_is_served_while_it_trains() -> None:
    monitor = PrometheusMonitor(PrometheusConfig(enabled=True, job_name='a "job"'))
    assert samples(fetch(monitor.port)) == {}
    monitor.write_events(EVENTS[:2])
    first = samples(fetch(monitor.port))
    monitor.write_events(EVENTS[2:])
    second = samples(fetch(monitor.port))
    monitor.close()
    here = ('a "job"', "0")
    assert first == {
        ("deepspeed_Train_Samples_lr", *here): 0.1,
        ("deepspeed_Train_Samples_train_loss", *here): 2.5,
        ("deepspeed_samples", *here): 8,
    }
    assert second == {**first, ("deepspeed_Train_Samples_lr", *here): 0.05, ("deepspeed_samples", *here): 16}


def test_values_that_are_no_numbers_are_told_as_they_are() -> None:
    monitor = PrometheusMonitor(PrometheusConfig(enabled=True))
    monitor.write_events([("loss", float("nan"), 8), ("scale", float("inf"), 8)])
    text = fetch(monitor.port)
    monitor.close()
    assert 'deepspeed_loss{job="DeepSpeedJobName",rank="0"} NaN' in text
    assert 'deepspeed_scale{job="DeepSpeedJobName",rank="0"} +Inf' in text


def test_two_metrics_never_share_a_name(caplog: pytest.LogCaptureFixture) -> None:
    monitor = PrometheusMonitor(PrometheusConfig(enabled=True))
    names = ["moe/0.gate", "moe/0_gate", "moe_0_gate", "samples", "samples ", "1st"]
    monitor.write_events([(name, number, 64) for number, name in enumerate(names)])
    found = {name: value for (name, _, _), value in samples(fetch(monitor.port)).items()}
    monitor.close()
    assert found.pop("deepspeed_moe_0_gate") == 0
    assert found.pop("deepspeed_1st") == 5
    assert found.pop("deepspeed_samples") == 64
    assert sorted(found.values()) == [1, 2, 3, 4]
    assert all(name.startswith(("deepspeed_moe_0_gate_", "deepspeed_samples_")) for name in found)
    assert "the metric 'moe/0_gate' is deepspeed_moe_0_gate_" in caplog.text


def test_only_this_host_is_listened_to_unless_the_config_says_more(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        monitor = PrometheusMonitor(PrometheusConfig(enabled=True))
    server = monitor._opened[0]
    assert server.server_address == ("127.0.0.1", monitor.port)
    monitor.close()
    assert f"http://127.0.0.1:{monitor.port}/metrics" in caplog.text


def test_the_port_is_free_when_close_returns_even_where_a_worker_holds_the_socket() -> None:
    before = threading.active_count()
    monitor = PrometheusMonitor(PrometheusConfig(enabled=True))
    held = os.dup(monitor._opened[0].socket.fileno())  # as a forked worker of a data loader has it
    try:
        monitor.close()
        monitor.close()
        assert threading.active_count() == before
        with pytest.raises(ConnectionRefusedError):
            fetch(monitor.port)
        again = PrometheusMonitor(PrometheusConfig(enabled=True, port=monitor.port))
        assert again.port == monitor.port
        assert samples(fetch(again.port)) == {}
        again.close()
    finally:
        os.close(held)


def test_another_process_that_closes_its_copy_leaves_the_endpoint_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = PrometheusMonitor(PrometheusConfig(enabled=True))
    pid = os.fork()
    if pid == 0:  # a worker with a copy of all this process has
        try:
            monitor.close()
        finally:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    monitor.write_events([("lr", 0.5, 8)])
    assert "deepspeed_lr" in fetch(monitor.port)
    monitor.close()


def test_an_endpoint_that_was_dropped_stops() -> None:
    monitor = PrometheusMonitor(PrometheusConfig(enabled=True))
    port, thread = monitor.port, monitor._opened[1]
    del monitor
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
    deadline = time.monotonic() + 20
    while True:  # the socket is closed a moment after the thread has ended
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            return


def test_a_port_in_use_is_an_error_that_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(MonitorError, match=rf"prometheus.port={port}: cannot listen.*in use.*0 for any that is free"):
            PrometheusMonitor(PrometheusConfig(enabled=True, port=port))


def test_an_address_of_another_host_is_an_error_that_says_so() -> None:
    with pytest.raises(MonitorError, match=r"prometheus.host='192.0.2.1'.*needed an address of this host"):
        PrometheusMonitor(PrometheusConfig(enabled=True, host="192.0.2.1"))
