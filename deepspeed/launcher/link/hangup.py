"""Whether somebody still reads what this process prints: how a launcher far away sees that its ssh session is gone.

A session without a terminal gives no signal when it ends; the pipes or sockets behind stdout and stderr lose their other
end, which the kernel tells at once, also while nothing is printed.
"""

from __future__ import annotations

import os
import select
import stat

__all__ = ["HangUpWatch"]


class HangUpWatch:
    """Is ready, for `select` and its like, once the reader of stdout or of stderr is gone; never by data.

    Nothing is seen where both go to files or terminals. Linux only.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        for fd in (1, 2):
            if _can_lose_its_reader(fd):
                self._epoll.register(fd, 0)  # errors and hang-ups are told unasked

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._epoll.fileno()


def _can_lose_its_reader(fd: int) -> bool:
    try:
        mode = os.fstat(fd).st_mode
    except OSError:  # closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
