"""Which bytes of a file are free: ranges are taken and given back, and the file is as long as it once had to be.

    file   |####|....|########|..|###|              #: taken   .: free, neighbours joined
                ^ the smallest free range that fits; else the end

Pure arithmetic. Called by `disk`; ranges begin and end at pages there.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort

__all__ = ["FileSpace"]


class FileSpace:
    """Free ranges of one file. Safe for several threads: the garbage collector gives back whenever it likes.

    Attributes:
        end: length of the file that holds all that was ever taken.
    """

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []  # (begin, end), in order, no two touch
        self._lock = threading.RLock()

    @property
    def free_nbytes(self) -> int:
        """Bytes below `end` that nobody has."""
        with self._lock:
            return sum(end - begin for begin, end in self._free)

    def take(self, nbytes: int) -> int:
        """Where `nbytes` > 0 bytes may be written."""
        with self._lock:
            fitting = [(end - begin, begin) for begin, end in self._free if end - begin >= nbytes]
            if fitting:
                size, begin = min(fitting)
                self._free.remove((begin, begin + size))
                if size > nbytes:
                    insort(self._free, (begin + nbytes, begin + size))
                return begin
            begin = self.end
            if self._free and self._free[-1][1] == self.end:
                begin = self._free.pop()[0]
            self.end = begin + nbytes
            return begin

    def give_back(self, begin: int, nbytes: int) -> None:
        """A range that was taken is free."""
        end = begin + nbytes
        with self._lock:
            place = bisect_left(self._free, (begin, end))
            if place < len(self._free) and self._free[place][0] == end:
                end = self._free.pop(place)[1]
            if place > 0 and self._free[place - 1][1] == begin:
                begin = self._free.pop(place - 1)[0]
            insort(self._free, (begin, end))
