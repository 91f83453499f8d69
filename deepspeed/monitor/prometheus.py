"""The newest value of each metric, for a Prometheus server to fetch over HTTP.

    write_events --> gauges of a registry of our own <-- GET /metrics (threads of prometheus_client, nothing is kept waiting)

"Train/Samples/lr" becomes `deepspeed_Train_Samples_lr{job="...",rank="0"}`; `deepspeed_samples` has the samples trained so
far, since the x axis of Prometheus is time.

[Note: who holds the socket] Forked workers of a data loader hold copies of the listening socket. Were ours alone closed, it
would go on listening in them: scrapers would wait for answers, and nobody else could have the port. So the process that
opened it, and no other, shuts it down: that ends it for all holders.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import weakref
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from deepspeed.common.logging import get_logger, get_rank, warn_once
from deepspeed.config.monitor import PrometheusConfig
from deepspeed.errors import MonitorError
from deepspeed.monitor.writer import Event, optional_package

logger = get_logger(__name__)

_PREFIX = "deepspeed_"
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusMonitor:
    """An endpoint at `host:port`, from construction until `close` or until nobody holds the monitor.

    Raises:
        MissingPackageError: the package `prometheus_client` is not installed.
        MonitorError: nobody can listen there.
    """

    def __init__(self, config: PrometheusConfig) -> None:
        self._client: Any = optional_package("prometheus_client", "prometheus")
        self._registry: Any = self._client.CollectorRegistry()
        self._labels = {"job": config.job_name, "rank": str(get_rank())}
        self._gauges: dict[str, Any] = {}
        self._samples: Any = self._client.Gauge(
            _PREFIX + "samples", "samples trained", list(self._labels), registry=self._registry
        )
        self._names = {_PREFIX + "samples"}
        try:
            server, thread = self._client.start_http_server(config.port, addr=config.host, registry=self._registry)
        except OSError as error:
            raise MonitorError(
                f"prometheus.host={config.host!r} with prometheus.port={config.port}: cannot listen there ({error}); needed "
                "an address of this host and a free port. Another job may hold the port, or an engine that was not "
                "destroyed: call its destroy(), set another port, or 0 for any that is free."
            ) from error
        self.port: int = server.server_port
        """Where it listens: the config's port, or the one that was chosen for 0."""
        self._opened = server, thread, os.getpid()
        self._dropped = weakref.finalize(self, _stop_later, *self._opened)
        self._dropped.atexit = False  # its threads end with the process, and none can be started then
        logger.info("Prometheus can fetch metrics at http://%s:%d/metrics", _in_url(config.host), self.port)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Set the gauges; the next one who asks sees them."""
        for name, value, samples in event_list:
            self._gauge(name).set(float(value))
            self._samples.labels(**self._labels).set(samples)

    def _gauge(self, name: str) -> Any:
        if name not in self._gauges:
            gauge = self._client.Gauge(self._free_name(name), name, list(self._labels), registry=self._registry)
            self._gauges[name] = gauge.labels(**self._labels)
        return self._gauges[name]

    def _free_name(self, event_name: str) -> str:
        """A name that Prometheus allows, and that no other event has got."""
        name = _PREFIX + _NOT_IN_NAMES.sub("_", event_name)
        if name in self._names:
            name, plain = f"{name}_{zlib.crc32(event_name.encode()):08x}", name
            warn_once(("prometheus", name), "the metric %r is %s for Prometheus: %s is another one", event_name, name, plain)
        self._names.add(name)
        return name

    def close(self) -> None:
        """Stop listening: the port is free when this returns."""
        if self._dropped.detach() is not None:
            _stop(*self._opened)


def _stop(server: Any, thread: threading.Thread, pid: int) -> None:
    """End the server and its thread ([Note: who holds the socket])."""
    if os.getpid() == pid:
        server.shutdown()
        thread.join()
        with suppress(OSError):  # where a socket that only listens counts as not connected
            server.socket.shutdown(socket.SHUT_RDWR)
    server.server_close()


def _stop_later(server: Any, thread: threading.Thread, pid: int) -> None:
    """As `_stop`, in a thread: what drops the last reference may run in the server's own, which cannot await its end."""
    threading.Thread(target=_stop, args=(server, thread, pid), daemon=True).start()


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
