"""Files of a job that go with it, also when the process that made them is killed."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

__all__ = ["removing"]

# Waits for the end of whoever holds the other end of its stdin, however that ends.
_KEEPER = 'trap "" INT TERM HUP; cat > /dev/null; rm -rf -- "$@"'


@contextlib.contextmanager
def removing(*paths: Path) -> Iterator[None]:
    """Remove `paths`, which are ours, at the end of the context, or of this process if it is killed before.

    Costs one small process meanwhile, in a session of its own.
    """
    keeper = subprocess.Popen(
        ["sh", "-c", _KEEPER, "sh", *(str(path.absolute()) for path in paths)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        assert keeper.stdin is not None  # it is a pipe
        keeper.stdin.close()
        keeper.wait()
