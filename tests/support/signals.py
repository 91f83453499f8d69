"""Signals that ask a job to end: what starts jobs must not hand on that it ignores them itself."""

from __future__ import annotations

import signal

__all__ = ["hear_signals"]


def hear_signals() -> None:
    """Stop ignoring the signals that end jobs: ignoring is inherited, from `nohup`, a shell's `&` and xdist's workers."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
