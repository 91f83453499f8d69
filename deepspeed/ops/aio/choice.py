"""Which back end carries out requests on this system. Called by `engine`."""

from __future__ import annotations

from deepspeed.errors import UsageError
from deepspeed.ops.aio.backend import Backend
from deepspeed.ops.aio.settings import IoSettings
from deepspeed.ops.aio.threads import ThreadsBackend

__all__ = ["make_backend"]


def make_backend(settings: IoSettings) -> Backend:
    """Start what `settings.kind` names; for "auto" the first that there is.

    Raises:
        UsageError: this system does not have the kind that is asked for.
    """
    if settings.kind in ("auto", "threads"):
        return ThreadsBackend(settings)
    raise UsageError(
        f"IoSettings(kind={settings.kind!r}), but this installation has no native library, which that kind is part of. "
        'Use "auto" or "threads".'
    )
