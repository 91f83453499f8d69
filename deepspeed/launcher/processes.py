"""Ending every process of a job: what the kernel offers, with no knowledge of ranks.

[Note: nobody is left behind] Three things hold on Linux, whatever a rank starts and however it detaches itself:
 1. a launcher adopts the orphans among its descendants (child subreaper), so "has no child" means "nothing is left";
 2. a rank dies with its launcher, and a launcher is told when its runner dies (parent death signal);
 3. whoever of runner and launcher outlives the other ends all descendants.
On other systems 1 and 2 are missing: processes that detach themselves from a rank stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import FrameType, TracebackType

import psutil

__all__ = [
    "SignalInbox",
    "adopting_orphans",
    "descendants",
    "die_with_parent",
    "end_processes",
    "signal_name",
    "start_process",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def start_process(
    argv: Sequence[str],
    environment: Mapping[str, str],
    on_our_end: signal.Signals,
    *,
    stdout: int | None = None,
    stderr: int | None = None,
    cores: Collection[int] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own: a terminal's Ctrl-C does not reach it, and it leads its own group.

    Args:
        argv: the command.
        environment: its whole environment.
        on_our_end: the signal it gets when this process ends. The kernel watches the calling thread, which must therefore
            live as long as the command.
        stdout: descriptor for its output; None: ours.
        stderr: descriptor for its errors; None: ours.
        cores: cores it may run on; None: those of this process.

    Raises:
        OSError: the command cannot be run.
    """
    parent = os.getpid()

    def before_exec() -> None:
        die_with_parent(parent, on_our_end)
        if cores is not None:
            os.sched_setaffinity(0, cores)

    return subprocess.Popen(
        argv,
        env=environment,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=before_exec,
    )


def die_with_parent(parent: int, signum: signal.Signals) -> None:
    """Get `signum` when the process `parent`, which forked this one, ends."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
        if os.getppid() != parent:  # it ended before the call
            os._exit(128 + signum)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Become, within the context, the parent of descendants whose own parent ends."""
    if _libc is None:
        yield
        return
    before = ctypes.c_int()
    _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def signal_name(signum: int) -> str:
    """The name of any signal; Python has none for most of the real-time ones."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"SIGRTMIN+{signum - signal.SIGRTMIN}"


def descendants() -> list[psutil.Process]:
    """All processes below this one, those included that have ended and wait to be reaped."""
    return psutil.Process().children(recursive=True)


def signal_all(processes: Collection[psutil.Process], signum: signal.Signals) -> None:
    """Send `signum` to each of `processes` that is still there, and that this user may end (sudo makes others)."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(signum)


def end_processes(spared: Collection[int], seconds: float) -> None:
    """End all descendants: by SIGTERM, and what is there `seconds` later by SIGKILL.

    Args:
        spared: process ids of children that stay, with all below them.
        seconds: time to end by themselves.
    """
    deadline = time.monotonic() + seconds
    signum = signal.SIGTERM
    while True:
        children = [child for child in psutil.Process().children() if child.pid not in spared]
        if not children:
            return
        signal_all([p for child in children for p in (child, *_below(child))], signum)
        psutil.wait_procs(children, timeout=max(0.05, deadline - time.monotonic()))  # reaps; orphans come up to us
        if time.monotonic() >= deadline:
            signum = signal.SIGKILL
        if time.monotonic() >= deadline + 1:  # a process in an uninterruptible call cannot be ended by anybody
            return


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


class SignalInbox:
    """Signals of this process as a queue that can be waited on: no handler runs at a bad moment.

    A context of the main thread; the handlers before it come back at its end. A request to end that was ignored stays
    ignored, as `nohup` and a shell's `&` want it; an ignored SIGCHLD would hide the status of children.
    """

    def __init__(self, *signums: signal.Signals) -> None:
        ignored = {signum for signum in signums if signal.getsignal(signum) is signal.SIG_IGN} - {signal.SIGCHLD}
        self._signums = [signum for signum in signums if signum not in ignored]

    def __enter__(self) -> SignalInbox:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {signum: signal.signal(signum, _noted_by_the_wakeup_fd) for signum in self._signums}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._reader.close()
        self._writer.close()

    def wait(self, seconds: float | None) -> list[int]:
        """Wait for signals, at most `seconds` (None: for ever); return their numbers in order of arrival."""
        select.select([self._reader], [], [], seconds)
        return self.read()

    def fileno(self) -> int:
        """What to wait for, where other things are waited for as well."""
        return self._reader.fileno()

    def read(self) -> list[int]:
        """The numbers of the signals that have come since, in order."""
        try:
            return [number for number in self._reader.recv(4096) if number in self._signums]
        except BlockingIOError:
            return []


def _noted_by_the_wakeup_fd(_signum: int, _frame: FrameType | None) -> None:
    """A handler must exist for the number to be written; the inbox reads it."""
