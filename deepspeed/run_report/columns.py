"""Numbers of many records side by side: what a run of any length is kept as.

    step       1     2     3        one row for each record, in the order of lines
    loss       9.1   8.4   nan      nan: not known
    phases     forward: rows 0 2, values 0.1 0.2        names that come up in a log, sparse

A record of a hundred thousand costs some hundred bytes so, and facts about all of them are sums over arrays. Columns grow in
place: what was handed out keeps its length. Does not live here: what the numbers mean (`reading`, `facts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Numbers", "Places", "Rows", "Table", "bounded"]

Numbers: TypeAlias = NDArray[np.float64]
Places: TypeAlias = NDArray[np.intp]

_BLOCK = 4096  # rows that wait as Python objects
_MOST_NAMES = 256  # of one group: a damaged log may tell another name in every line
_FARTHEST = 1e290  # values beyond it count as it: their sums would overflow
_LARGEST = 2**51  # whole numbers beyond it count as it: halves are floats up to there, which an axis needs


class _Growing:
    """A matrix that rows are appended to."""

    def __init__(self, width: int) -> None:
        self._data = np.empty((width, 0))
        self._count = 0
        self._new: list[Sequence[float | None]] = []

    def __len__(self) -> int:
        return self._count + len(self._new)

    def append(self, row: Sequence[float | None]) -> None:
        self._new.append(row)
        if len(self._new) >= _BLOCK:
            self._settle()

    def column(self, at: int) -> Numbers:
        self._settle()
        return self._data[at, : self._count]

    def _settle(self) -> None:
        if not self._new:
            return
        new = np.array(self._new, dtype=np.float64).T.clip(-_FARTHEST, _FARTHEST)  # None becomes nan
        self._new = []
        count = self._count + new.shape[1]
        if count > self._data.shape[1]:
            grown = np.empty((len(self._data), max(count, self._count * 3 // 2)))
            grown[:, : self._count] = self._data[:, : self._count]
            self._data = grown
        self._data[:, self._count : count] = new
        self._count = count


class Table:
    """Columns with names known beforehand, and groups of columns whose names come up.

    Args:
        names: of the columns that every row has.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._at = {name: at for at, name in enumerate(names)}
        self._numbers = _Growing(len(names))
        self._groups: dict[str, dict[str, _Growing]] = {}

    def __len__(self) -> int:
        """Rows."""
        return len(self._numbers)

    def append(self, row: Sequence[float | None], **groups: Mapping[str, float | None] | None) -> None:
        """Add a row.

        Args:
            row: a value for each column.
            groups: by group, values by name; of each group the first 256 names count.
        """
        at = len(self._numbers)
        self._numbers.append([_float_of(value) for value in row])
        for group, values in groups.items():
            for name, value in (values or {}).items():
                self._named(group, name, at, value)

    def _named(self, group: str, name: str, at: int, value: float | None) -> None:
        columns = self._groups.setdefault(group, {})
        if name not in columns:
            if len(columns) >= _MOST_NAMES:
                return
            columns[name] = _Growing(2)
        columns[name].append((at, value))

    def names(self, group: str) -> Sequence[str]:
        """Names of a group, in the order in which they came up."""
        return tuple(self._groups.get(group, ()))

    def column(self, name: str, group: str | None = None) -> Numbers:
        """Values of all rows, nan where they are not known."""
        if group is None:
            return self._numbers.column(self._at[name])
        found = np.full(len(self), np.nan)
        sparse = self._groups.get(group, {}).get(name)
        if sparse is not None:
            found[sparse.column(0).astype(np.intp)] = sparse.column(1)
        return found


@dataclass(frozen=True)
class Rows:
    """Some rows of tables that have the same columns, one table after the other."""

    parts: tuple[tuple[Table, Places], ...] = ()

    def __len__(self) -> int:
        """How many rows."""
        return sum(len(places) for _, places in self.parts)

    def names(self, group: str) -> list[str]:
        """Names of a group in all tables, in the order in which they came up."""
        return list(dict.fromkeys(name for table, _ in self.parts for name in table.names(group)))

    def values(self, name: str, group: str | None = None) -> Numbers:
        """A value for each row, nan where it is not known."""
        return np.concatenate([table.column(name, group)[places] for table, places in self.parts] or [np.empty(0)])

    def known(self, name: str, group: str | None = None) -> Numbers:
        """The values that are known."""
        values = self.values(name, group)
        return values[~np.isnan(values)]

    def last(self, name: str, group: str | None = None) -> float | None:
        """The value of the last row."""
        values = self.values(name, group)[-1:]
        return None if len(values) == 0 or np.isnan(values[0]) else float(values[0])


def bounded(value: float) -> float:
    """The value, or the nearest that counts."""
    return min(max(value, -_FARTHEST), _FARTHEST)


def _float_of(value: float | None) -> float | None:
    """The value; whole numbers that no float holds as the nearest one of use."""
    return min(max(value, -_LARGEST), _LARGEST) if isinstance(value, int) else value
