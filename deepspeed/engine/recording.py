"""Leave an engine's full-precision parameters in files after each of its first steps, then end the script.

    initialize --> StepRecorder(engine).start() --> step 0 written     engine.backward keeps the loss
    engine.step() --> an update? --> step n written --> n == steps? --> SystemExit(0)

For `deepspeed verify`, which runs a script twice and compares (`launcher.verify`). Does not live here: reading the wish
(`launcher.verification`), comparing. `deepspeed.initialize` calls it, and only when asked.

[Note: methods replaced] `backward` and `step` of the one engine object are replaced, so that an engine that nobody
records has nothing to ask in each step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from deepspeed import comm
from deepspeed.checkpoint.disk.container import Entry, write_container
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.zero.access import safe_get_full_fp32_param

__all__ = ["StepRecorder"]


class _Sink:
    """A file as `write_container` wants it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: memoryview) -> None:
        self._file.write(data)


class StepRecorder:
    """Records one engine. All methods are collective over all ranks.

    Args:
        engine: just made.
        file: where the values after a step go; rank 0 writes.
        steps: the script ends after so many.
        facts: put into each file.
    """

    def __init__(self, engine: DeepSpeedEngine, file: Callable[[int], Path], steps: int, facts: dict[str, str]) -> None:
        self._engine = engine
        self._file = file
        self._steps = steps
        self._facts = facts
        self._losses: list[float] = []

    def start(self) -> None:
        """Write the values before the first step, and follow the engine from now on. [Note: methods replaced]"""
        engine: Any = self._engine
        backward, step = engine.backward, engine.step

        @functools.wraps(backward)
        def recorded_backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(loss, Tensor) and loss.numel() == 1:  # else the engine says what is wrong with it
                self._losses.append(float(loss.detach()))
            return backward(loss, *args, **kwargs)

        @functools.wraps(step)
        def recorded_step(*args: Any, **kwargs: Any) -> None:
            before = engine.global_steps
            step(*args, **kwargs)
            if engine.global_steps > before:
                self._write(engine.global_steps)
                if engine.global_steps >= self._steps:
                    raise SystemExit(0)

        engine.backward, engine.step = recorded_backward, recorded_step
        self._write(0)

    def _write(self, step: int) -> None:
        facts = {**self._facts, "loss": repr(self._mean_loss())}
        entries = list(self._entries())
        if self._engine.global_rank == 0:
            path = self._file(step)
            partial = path.with_suffix(".partial")
            with partial.open("wb") as sink:
                write_container(_Sink(sink), entries, facts)
            partial.replace(path)

    def _entries(self) -> Iterator[Entry]:
        is_writer = self._engine.global_rank == 0
        for name, param in self._engine.module.named_parameters():
            value = safe_get_full_fp32_param(param)
            if value is not None and is_writer:
                yield Entry(name, tuple(value.shape), value.cpu())

    def _mean_loss(self) -> float:
        """Mean over micro-batches and ranks since the last update; NaN where the script calls backward by itself."""
        own = sum(self._losses) / len(self._losses) if self._losses else math.nan
        self._losses.clear()
        everyones = [math.nan] * comm.get_world_size()
        comm.all_gather_object(everyones, own)
        return sum(everyones) / len(everyones)
