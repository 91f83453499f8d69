r"""Let the back end's threads finish before the interpreter is torn down.

    last collective returns --> script ends --> atexit: wait until no thread is at work --> Python finalizes
                  \-- a gloo thread still lets go of the tensors, for which it needs the interpreter

A thread that asks for the interpreter while it is being finalized is ended by force, inside C++ code that does not expect
that: "terminate called without an active exception", SIGABRT, after all work was done. A script that ends right after a
collective (a checkpoint, say) met that once in five runs on a busy machine.

Lives here: the wait. Does not live here: taking process groups down; who made one may still hold it. `comm.world` calls it.
"""

from __future__ import annotations

import atexit
import threading
import time
from pathlib import Path

__all__ = ["settle_threads", "settle_threads_at_exit"]

_TASKS = Path("/proc/self/task")
_LIMIT_SECONDS = 1.0  # a thread of the user's that never rests does not hold the exit up for longer
_POLL_SECONDS = 0.002
_QUIET_POLLS = 3


def settle_threads_at_exit() -> None:
    """Have `settle_threads` run when the interpreter exits, once however often this is called."""
    atexit.unregister(settle_threads)
    atexit.register(settle_threads)


def settle_threads(limit_seconds: float = _LIMIT_SECONDS) -> bool:
    """Wait, without holding the interpreter, until every other thread of this process sleeps; say whether that came.

    Where the kernel does not tell what threads do, wait a moment and answer True.
    """
    if not _TASKS.is_dir():
        time.sleep(_POLL_SECONDS * _QUIET_POLLS)
        return True
    deadline = time.monotonic() + limit_seconds
    quiet = 0
    while quiet < _QUIET_POLLS and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        quiet = 0 if _is_any_other_at_work() else quiet + 1
    return quiet == _QUIET_POLLS


def _is_any_other_at_work() -> bool:
    me = threading.get_native_id()
    return any(_state(task) in ("R", "D") for task in _TASKS.iterdir() if task.name != str(me))


def _state(task: Path) -> str:
    """The kernel's letter for what a thread does; empty when it has ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
