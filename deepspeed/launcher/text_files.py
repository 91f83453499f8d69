"""Files of text that users write for a job: hostfiles, files of variables.

Does not live here: what they say (`hostfile`, `environment`, which call this).
"""

from __future__ import annotations

import os
from pathlib import Path

from deepspeed.errors import LaunchError

__all__ = ["read_text"]


def read_text(path: Path) -> str | None:
    """The text of the file `path`, None when there is no such file that this user can see. A byte order mark is no text.

    Raises:
        LaunchError: it cannot be read, or is no UTF-8.
    """
    if not os.path.isfile(path):
        return None
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise LaunchError(f"{path} cannot be read: {error.strerror}. Make it readable, or name another file.") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise LaunchError(f"{path} is no UTF-8 (line {line}): save it as plain UTF-8 text.") from None
