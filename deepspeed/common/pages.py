"""Writing a page for a browser: whole, or not at all.

    PATH.part --> synced --> PATH          a full disk or a killed process leaves the page that was there before

Called by commands that write HTML. Does not live here: what is on a page.
"""

from __future__ import annotations

import os
from pathlib import Path

from deepspeed.errors import FileIoError

__all__ = ["write_page"]


def write_page(path: Path, page: str, cure: str) -> None:
    """Write a page in place of the one that is there.

    Args:
        path: where it goes; a device or a pipe is written to as it is.
        page: its text; what is no Unicode text becomes `?`.
        cure: what the error tells to do.

    Raises:
        FileIoError: it cannot be written there.
    """
    is_plain = path.is_file() or not path.exists()
    target = path.resolve() if is_plain else path  # a link stays one
    part = target.with_name(f"{target.name}.{os.getpid()}.part") if is_plain else target
    try:
        with part.open("w", encoding="utf-8", errors="replace") as file:
            file.write(page)
            file.flush()
            if is_plain:
                os.fsync(file.fileno())
        if is_plain:
            part.replace(target)
    except OSError as error:
        if is_plain:
            part.unlink(missing_ok=True)
        why = f"{path}: the page could not be written there ({error.strerror}); {cure}"
        raise FileIoError(error.errno, why, str(path)) from error
