"""Stand-ins for `comm.algorithms.FlatAllReducer`: no processes, every launch on record."""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.topology.mesh import AxisGroup


class RecordingReducer:
    """Pretends that all ranks hold the same gradients, so that the mean is what is there; keeps launches and waits."""

    def __init__(self, numel: int, dtype: torch.dtype = torch.float32, journal: list[str] | None = None) -> None:
        self.buffer = torch.zeros(numel, dtype=dtype)
        self.journal: list[str] = [] if journal is None else journal
        self.is_closed = False

    def launch(self, start: int, stop: int) -> _RecordedWork:
        """Put the launch on record."""
        self.journal.append(f"launch {start}:{stop}")
        return _RecordedWork(self.journal, f"wait {start}:{stop}")

    def close(self) -> None:
        """Remember it."""
        self.is_closed = True


class _RecordedWork:
    def __init__(self, journal: list[str], line: str) -> None:
        self._journal, self._line = journal, line

    def wait(self) -> None:
        self._journal.append(self._line)


class FailingReducer(RecordingReducer):
    """Its second launch breaks when it is waited for, as when a peer dies."""

    def launch(self, start: int, stop: int) -> _RecordedWork:
        """A work that raises, from the second on."""
        work = super().launch(start, stop)
        return work if len(self.journal) == 1 else _FailingWork(self.journal, "never")


class _FailingWork(_RecordedWork):
    def wait(self) -> None:
        raise RuntimeError("peer closed the connection")


def pretend_axis(size: int) -> AxisGroup:
    """An axis of `size` ranks without any process behind it."""
    return AxisGroup(range(size), 0, group=object())  # type: ignore[arg-type]


def named_grads(params: dict[str, Tensor]) -> dict[str, list[float]]:
    """Gradients as lists, for comparing by eye."""
    return {name: [] if p.grad is None else p.grad.flatten().tolist() for name, p in params.items()}
