"""Threads that wait in a blocking call for others, kept for the next call.

    caller    lend(call) --queue--> helper: call() --queue--> outcome        the caller may look at other things meanwhile
              a helper whose call never returns stays behind; the next call gets another

A thread that is woken runs at once; a new one may wait for its turn behind all that computes: on a busy machine that is a
millisecond and more for each message.

Lives here: threads. Does not live here: which calls block, what is done meanwhile (`comm.watch`, which calls this).
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Outcome", "dismiss", "lend"]


class Outcome(NamedTuple):
    """How a call ended."""

    value: Any
    error: BaseException | None

    def result(self) -> Any:
        """What the call returned, or raise what it raised."""
        if self.error is not None:
            raise self.error
        return self.value


_Job = tuple[Callable[[], Any], "queue.SimpleQueue[Outcome]"]

_idle: deque[queue.SimpleQueue[_Job | None]] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # a child has none of its parent's threads


def lend(call: Callable[[], Any]) -> queue.SimpleQueue[Outcome]:
    """Have a helper thread run `call()`; its outcome comes into the queue that is returned.

    Any thread may call it. Helpers are daemons: what still waits in one does not keep the process.
    """
    outcome: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    try:
        jobs = _idle.pop()
    except IndexError:
        jobs = queue.SimpleQueue()
        threading.Thread(target=_help, args=(jobs,), name="deepspeed blocked", daemon=True).start()
    jobs.put((call, outcome))
    return outcome


def dismiss() -> None:
    """Let the threads that wait for a call end."""
    while _idle:
        _idle.pop().put(None)


def _help(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        call, outcome = job
        try:
            ended = Outcome(call(), None)
        except BaseException as error:  # the caller raises it
            ended = Outcome(None, error)
        _idle.append(jobs)  # first, so that the caller finds this thread for its next call
        outcome.put(ended)
        del job, call, outcome, ended  # nothing is kept alive until the next call
