"""The twin of the native back ends: Python threads that call preadv and pwritev, one block each at a time.

Called by `engine` where the native library is absent. The interpreter's lock is free while a thread is in the system, so
blocks overlap each other and the training; per block it costs some ten microseconds more than native code.
"""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import threading

from deepspeed.ops.aio.backend import Outcome, Ticket, Transfer
from deepspeed.ops.aio.settings import IoSettings

__all__ = ["MAX_THREADS", "ThreadsBackend"]

MAX_THREADS = 64
"""The most threads of one engine of this kind, native or not."""

_STACK_NBYTES = 512 << 10
"""Of a thread; the system's own choice, 8 MiB as a rule, would count against a limit of the process's memory."""


class _Request:
    """A transfer and how far it is. The lock guards what the workers change."""

    def __init__(self, transfer: Transfer, blocks: int) -> None:
        self.transfer = transfer
        self._left = blocks
        self._failures: list[Outcome] = []
        self._lock = threading.Lock()
        self._done = threading.Event()

    def wait(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def outcome(self) -> Outcome:
        if not self._failures:
            return Outcome(0, self.transfer.nbytes)
        return min(self._failures, key=lambda failure: failure.moved_nbytes)

    def move_block(self, start: int, nbytes: int) -> None:
        """Move one block of the middle; the worker that has moved the last one moves the edges too."""
        transfer = self.transfer
        self._move(start, nbytes, transfer.middle_fd)
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            end = transfer.middle_start + transfer.middle_nbytes
            self._move(0, transfer.middle_start, transfer.edge_fd)
            self._move(end, transfer.nbytes - end, transfer.edge_fd)
            self._done.set()

    def _move(self, start: int, nbytes: int, fd: int) -> None:
        transfer, end = self.transfer, start + nbytes
        while start < end and not self._has_failed_before(start):
            memory = (ctypes.c_char * (end - start)).from_address(transfer.address + start)
            try:
                count = (os.pwritev if transfer.is_write else os.preadv)(fd, [memory], transfer.offset + start)
            except OSError as error:
                if error.errno == errno.EINVAL and fd != transfer.edge_fd:  # the file system is stricter than it said
                    fd = transfer.edge_fd
                    continue
                self._fail(error.errno or errno.EIO, start)
                return
            if count == 0:
                self._fail(errno.ENOSPC if transfer.is_write else errno.ENODATA, start)
                return
            start += count
            fd = transfer.edge_fd  # what is left need not be aligned any more

    def _has_failed_before(self, start: int) -> bool:
        """What lies behind a failure is not moved; what lies before it is, so that the failure reported is the first."""
        return any(failure.moved_nbytes < start for failure in self._failures)

    def _fail(self, number: int, start: int) -> None:
        with self._lock:
            self._failures.append(Outcome(number, start))


class ThreadsBackend:
    """Blocks wait in one queue; each thread takes the next."""

    kind = "threads"

    def __init__(self, settings: IoSettings) -> None:
        self._block_nbytes = settings.whole_block_nbytes
        self._blocks: queue.SimpleQueue[tuple[_Request, int, int] | None] = queue.SimpleQueue()
        count = min(settings.threads * settings.queue_depth, MAX_THREADS)
        # Daemons: an engine that nobody closed is closed at the end of the interpreter, which waits for others before
        # that.
        self._threads = [
            threading.Thread(target=self._serve, name=f"file-io-{number}", daemon=True) for number in range(count)
        ]
        usual_nbytes = threading.stack_size(_STACK_NBYTES)
        try:
            for thread in self._threads:
                thread.start()
        finally:
            threading.stack_size(usual_nbytes)

    def submit(self, transfer: Transfer) -> Ticket:
        """Put its blocks in the queue."""
        start, step = transfer.middle_start, self._block_nbytes
        end = start + transfer.middle_nbytes
        request = _Request(transfer, len(range(start, end, step)))
        for at in range(start, end, step):
            self._blocks.put((request, at, min(step, end - at)))
        return request

    def close(self) -> None:
        """End the threads when the queue is empty."""
        for _ in self._threads:
            self._blocks.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (block := self._blocks.get()) is not None:
            request, start, nbytes = block
            request.move_block(start, nbytes)
