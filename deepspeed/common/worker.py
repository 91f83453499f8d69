r"""One thread behind training, with its own number of torch threads: work goes in, errors come out where somebody waits.

    caller    submit(work) ------------- goes on ------------- join()   raises what `work` raised
                    \                                          /
    thread           work() -> kernels with `threads` threads -

Work runs in the order it was given. The thread is made at the first `submit` and ends with `close`, or with its Worker. It
is a daemon: what it does must not be needed after the interpreter's end. Callers: `ops.adam.zenflow`, `zero.zenflow.rest`,
for an update behind training; `zero.threaded`, for one in two threads.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

import torch

from deepspeed.errors import UsageError

__all__ = ["Worker", "thread_share"]

Work = Callable[[], object]


def thread_share(share: float) -> int:
    """`share` of the caller's torch threads, at least one: 0.25 of 8 are 2."""
    return max(1, int(torch.get_num_threads() * share))


class Worker:
    """A thread that does what it is given.

    Args:
        name: of the thread, for whoever looks at a hanging process.
        threads: torch threads of its kernels; None: as many as the caller has.
    """

    def __init__(self, name: str, threads: int | None = None) -> None:
        self._name = name
        self._threads = threads
        self._thread: threading.Thread | None = None
        self._tray = _Tray()
        self._is_closed = False
        weakref.finalize(self, self._tray.end)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits."""
        return self._tray.idle.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether `join` would raise, as far as work has come."""
        return self._tray.error is not None

    def submit(self, work: Work) -> None:
        """Run `work` behind the caller. After an error nothing more is run until `join` has raised it.

        Raises:
            UsageError: the worker is closed.
        """
        if self._is_closed:
            raise UsageError(f"work was given to {self._name!r} after close(). Make a new one.")
        if self._thread is None:
            self._start()
        self._tray.put(work)

    def join(self) -> None:
        """Block until all work is done; raise the first error there was, once."""
        self._tray.idle.wait()
        error, self._tray.error = self._tray.error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the work and end the thread. An error that nobody has joined for is dropped with its work."""
        self._is_closed = True
        if self._thread is not None:
            self._tray.end()
            self._thread.join()
            self._thread = None

    def _start(self) -> None:
        before = torch.get_num_threads()
        is_ready = threading.Event()
        arguments = (self._tray, self._threads or before, is_ready)
        self._thread = threading.Thread(target=_run, args=arguments, name=self._name, daemon=True)
        self._thread.start()
        is_ready.wait()
        torch.set_num_threads(before)  # the thread's own number also became that of threads yet to come


class _Tray:
    """What a worker and its thread share; the thread keeps no worker alive."""

    def __init__(self) -> None:
        self.idle = threading.Event()
        self.idle.set()
        self.error: BaseException | None = None
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._left = 0
        self._lock = threading.Lock()

    def put(self, work: Work) -> None:
        with self._lock:
            self._left += 1
            self.idle.clear()
        self._queue.put(work)

    def end(self) -> None:
        self._queue.put(None)

    def take(self) -> Work | None:
        return self._queue.get()

    def done(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self.idle.set()


def _run(tray: _Tray, threads: int, is_ready: threading.Event) -> None:
    torch.set_num_threads(threads)
    torch.get_num_threads()  # fixes the thread's own number, before the caller sets its own again
    is_ready.set()
    while (work := tray.take()) is not None:
        try:
            if tray.error is None:
                work()
        except BaseException as error:  # raised again in `join`, in the thread that waits for the work
            tray.error = error
        finally:
            del work
            tray.done()
