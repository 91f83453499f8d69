r"""One thread behind training, with its own number of torch threads: work goes in, errors come out where somebody waits.

    caller    submit(work) ------------- goes on ------------- join()   raises what `work` raised
                    \                                          /
    thread           work() -> kernels with `threads` threads -

Work runs in the order it was given. The thread is made at the first `submit` and is a daemon: what it does must not be
needed after the interpreter's end. Callers: `ops.adam.zenflow` and `zero.zenflow.rest`, for an update behind training.
"""

from __future__ import annotations

import queue
import threading
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
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._left = 0
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits."""
        return self._idle.is_set()

    def submit(self, work: Work) -> None:
        """Run `work` behind the caller. After an error nothing more is run until `join` has raised it.

        Raises:
            UsageError: the worker is closed.
        """
        if self._is_closed:
            raise UsageError(f"work was given to {self._name!r} after close(). Make a new one.")
        if self._thread is None:
            self._start()
        with self._lock:
            self._left += 1
            self._idle.clear()
        self._queue.put(work)

    def join(self) -> None:
        """Block until all work is done; raise the first error there was, once."""
        self._idle.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the work and end the thread. An error that nobody has joined for is dropped with its work."""
        self._is_closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _start(self) -> None:
        before = torch.get_num_threads()
        is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(is_ready, before), name=self._name, daemon=True)
        self._thread.start()
        is_ready.wait()
        torch.set_num_threads(before)  # the thread's own number also became that of threads yet to come

    def _run(self, is_ready: threading.Event, threads: int) -> None:
        torch.set_num_threads(self._threads or threads)
        torch.get_num_threads()  # fixes the thread's own number, before the caller sets its own again
        is_ready.set()
        while (work := self._queue.get()) is not None:
            try:
                if self._error is None:
                    work()
            except BaseException as error:  # raised again in `join`, in the thread that waits for the work
                self._error = error
            finally:
                del work
                with self._lock:
                    self._left -= 1
                    if not self._left:
                        self._idle.set()
