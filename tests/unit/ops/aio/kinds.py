"""The back ends that tests go through: each that this machine has, and the Python twin."""

from __future__ import annotations

import dataclasses

import pytest

from deepspeed.errors import UsageError
from deepspeed.ops.aio.engine import IoEngine, IoSettings
from deepspeed.ops.aio.threads import ThreadsBackend

TWIN = "twin"
KINDS = (TWIN, "threads", "libaio", "io_uring")


def make_engine(kind: str, settings: IoSettings | None = None) -> IoEngine:
    """An engine of this kind; skips the test where the machine has none of it."""
    settings = settings or IoSettings()
    if kind == TWIN:
        return IoEngine(settings, ThreadsBackend(settings))
    try:
        return IoEngine(dataclasses.replace(settings, kind=kind))  # type: ignore[arg-type]
    except UsageError as error:
        pytest.skip(str(error))
