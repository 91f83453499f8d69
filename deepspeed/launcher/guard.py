"""One process that watches another and leaves nothing of it behind, whichever of the two is killed.

```
   guard --(starts; the child gets SIGTERM when the guard ends)--> child --> its ranks, and what they start
     |  passes on requests to end
     |-- the child ends --------------------------> its exit status
     '-- the child is ended by signal n ----------> what is left below is ended; 128 + n
```

The runner guards the launcher of its own host; on another host, where the runner is far, the launcher is started under a
guard of its own (`run_guarded`). Both rest on [Note: nobody is left behind] in `processes`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from types import FrameType

import psutil

from deepspeed.common.logging import get_logger
from deepspeed.launcher.processes import adopting_orphans, die_with_parent, end_processes, signal_name

__all__ = ["Requests", "run_guarded", "wait_guarded"]

logger = get_logger("deepspeed.launcher.runner")  # the name under which users know these messages

_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Requests:
    """Requests to end (SIGINT, SIGTERM, SIGHUP) go to whom `pass_on_to` names; ignored ones stay ignored.

    Those that come before are kept for it. Python calls handlers in the main thread only; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self._early: list[int] = []
        self._send: Callable[[int], object] | None = None
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Requests:
        if threading.current_thread() is threading.main_thread():
            for signum in _REQUESTS:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._before[signum] = signal.signal(signum, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def pass_on_to(self, send: Callable[[int], object]) -> None:
        """Call `send` with the number of each signal from now on, and of those that have come."""
        self._send = send
        for signum in self._early:
            send(signum)

    def _received(self, signum: int, _frame: FrameType | None) -> None:
        if self._send is None:
            self._early.append(signum)
        else:
            self._send(signum)


def wait_guarded(child: subprocess.Popen[bytes]) -> int:
    """Wait for the end of `child` and return its exit status; end what it leaves when a signal ended it.

    Call it inside `adopting_orphans`. Other children of this process are left alone.
    """
    others = {process.pid for process in psutil.Process().children()} - {child.pid}
    code = child.wait()
    return _settled(code, others)


def run_guarded(body: Callable[[], int]) -> int:
    """Run `body` in a forked child, in a session of its own, under the guard of this process; return its exit status.

    Call it while this process has one thread and no other child.
    """
    with adopting_orphans(), Requests() as requests:
        parent = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _REQUESTS)
        pid = os.fork()
        if pid == 0:
            requests.__exit__()
            os._exit(_body_status(body, parent, before))
        requests.pass_on_to(lambda signum: _send(pid, signum))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _, status = os.waitpid(pid, 0)
        return _settled(os.waitstatus_to_exitcode(status), set())


def _send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _body_status(body: Callable[[], int], parent: int, mask: Iterable[int]) -> int:
    """What the child does: nothing may come out of it but a status, or the caller's code would run twice."""
    try:
        os.setsid()
        die_with_parent(parent, signal.SIGTERM)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `body` has handlers of its own, a request just ends us
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = body()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        return 1
    return status


def _settled(code: int, others: set[int]) -> int:
    """The exit status for the end `code` of a child, as Popen tells it."""
    if code >= 0:
        return code
    logger.error("the launcher was ended by signal %d (%s), and its ranks with it", -code, signal_name(-code))
    end_processes(spared=others, seconds=1)  # its ranks died with it; what they had started is ours now
    return 128 - code
