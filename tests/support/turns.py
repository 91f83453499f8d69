"""Tests that several workers (`pytest -n 2`) run side by side, and those that need the machine for themselves.

    worker 0   |-- test --|-- test --|  waits   |== alone ==|-- test --|
    worker 1   |---- test ----|--- test ---|    |   waits   |-- test --|

A test marked `alone` has a limit in it, on something that its own processes do, that is only a second or two above what
they need (ranks have 3 s to end, and the job has ended within 5 s): it begins when no other runs, and no other begins until
it has ended. Meanwhile processors idle, so limits with more room than that are met beside others.
Locks of files: those of a worker that dies are free at once.

Called by the hook around each test in `conftest`.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Wait until a test may run beside those that do, or until it may run alone.

    Args:
        folder: the same for all workers of a run, and for them only.
        alone: nothing else may run meanwhile.
    """
    with (folder / "gate").open("w") as gate, (folder / "room").open("w") as room:
        fcntl.flock(gate, fcntl.LOCK_EX)  # who waits for the room to empty holds the gate, so that it does
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
