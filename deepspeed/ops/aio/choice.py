"""Which back end carries out requests on this system. Called by `engine`."""

from __future__ import annotations

from deepspeed.common.logging import get_logger
from deepspeed.errors import UsageError
from deepspeed.ops.aio.backend import Backend
from deepspeed.ops.aio.native import NATIVE_KINDS, NativeBackend
from deepspeed.ops.aio.settings import IoSettings
from deepspeed.ops.aio.threads import ThreadsBackend
from deepspeed.ops.native import absence, library

__all__ = ["OPERATOR", "make_backend"]

OPERATOR = "async_io"
"""Documented name of the operator that the native code belongs to."""

_logger = get_logger(__name__)


def make_backend(settings: IoSettings) -> Backend:
    """Start what `settings.kind` names; for "auto" the first that there is.

        io_uring ---> libaio ---> threads, native ---> threads, Python (without the native library)

    Raises:
        UsageError: this system does not have the kind that is asked for.
    """
    native = library(OPERATOR)
    if native is None:
        if settings.kind in ("auto", "threads"):
            return ThreadsBackend(settings)
        raise UsageError(
            f"IoSettings(kind={settings.kind!r}) needs native code, and here {absence(OPERATOR)}. "
            'Use "auto" or "threads", or install the package with a C++ compiler.'
        )
    kinds = NATIVE_KINDS if settings.kind == "auto" else (settings.kind,)
    refusals = []
    for kind in kinds:
        try:
            return NativeBackend(native, kind, settings)
        except OSError as error:
            _logger.debug("file access by %s is refused: %s", kind, error)
            refusals.append(f"{kind}: {error.strerror}")
    raise UsageError(
        f"IoSettings(kind={settings.kind!r}, queue_depth={settings.queue_depth}, threads={settings.threads}), but the "
        f'system refuses ({"; ".join(refusals)}). Use "auto", or less depth and fewer threads.'
    )
