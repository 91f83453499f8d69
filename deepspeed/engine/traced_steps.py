"""Trace some steps of an engine with torch's profiler: one file per rank, for chrome://tracing or Perfetto.

    deepspeed --profile-steps 5-7 train.py      each rank: step 4 over --> profiler on, names on (`named_ranges`)
                                                           step 7 over --> FOLDER/rank-00000.trace.json, everything off

A script that ends before the last step leaves a trace of the steps that there were. Does not live here: the wish (above this
room, `launcher.tracing`). `deepspeed.initialize` makes one for the first engine that trains, and only when asked.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile, supported_activities

from deepspeed.common.logging import get_logger, log_dist
from deepspeed.engine.named_ranges import named_ranges
from deepspeed.engine.replaced import ReplacedMethods
from deepspeed.errors import ArgumentError

if TYPE_CHECKING:
    from deepspeed.engine.engine import DeepSpeedEngine

__all__ = ["TracedSteps", "trace_name"]

logger = get_logger(__name__)


def trace_name(rank: int) -> str:
    """Name of a rank's file in the folder."""
    return f"rank-{rank:05d}.trace.json"


class TracedSteps:
    """Of one engine. Nothing is collective.

    Args:
        engine: just made.
        first: number of the first step, as progress lines have it: the first update is step 1.
        last: of the last one.
        folder: made when it lacks.
    """

    def __init__(self, engine: DeepSpeedEngine, first: int, last: int, folder: Path) -> None:
        self._engine = engine
        self._first = first
        self._last = last
        self._path = folder / trace_name(engine.global_rank)
        self._methods = ReplacedMethods()
        self._running = ExitStack()
        self._profiler: Any = None

    def start(self) -> None:
        """Wait for the first step.

        Raises:
            ArgumentError: this rank cannot write to the folder; found here, it costs no training.
        """
        _make(self._path.parent)
        self._methods.replace(self._engine, "_update", self._updated)
        atexit.register(self.stop)
        self._look()

    def stop(self) -> None:
        """Write what was traced, and take everything off. A second call does nothing."""
        atexit.unregister(self.stop)
        self._methods.restore()
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            if self._engine.global_steps < self._first:
                logger.warning("the script ended before step %d: nothing was traced.", self._first)
            return
        self._running.close()
        try:
            _export(profiler, self._path)
        except OSError as error:  # a trace is no reason to end a run
            logger.warning("the trace %s cannot be written (%s): there is none of this rank.", self._path, error)
            return
        done = self._engine.global_steps
        if done < self._last:
            logger.warning("%s", _ended_early(self._first, self._last, done))
        last = min(max(done, self._first), self._last)
        log_dist(f"traces of steps {self._first} to {last}, one file per rank: {self._path.parent}")

    def _updated(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        self._look()
        return result

    def _look(self) -> None:
        """A step is over, or none has begun."""
        done = self._engine.global_steps
        if done >= self._last:
            self.stop()
        elif done >= self._first - 1 and self._profiler is None:
            self._begin()

    def _begin(self) -> None:
        kinds = supported_activities() - {ProfilerActivity.CPU}  # type: ignore[no-untyped-call]
        self._profiler = profile(activities=[ProfilerActivity.CPU, *sorted(kinds, key=str)])
        self._running.enter_context(self._profiler)
        self._methods.restore()  # on top of the names: the last step's must have ended when the profiler stops
        self._running.enter_context(named_ranges(self._engine))
        self._methods.replace(self._engine, "_update", self._updated)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        cause = "" if os.access(folder, os.W_OK) else "no permission to write"
    except OSError as error:
        cause = str(error)
    if cause:
        raise ArgumentError(
            f"--profile-folder {folder}: no trace can be written there ({cause}); needed a folder that each rank can write "
            "to. Name another one."
        )


def _export(profiler: Any, path: Path) -> None:
    """Raises OSError where there is no file afterwards: the profiler itself only says so on standard error."""
    path.unlink(missing_ok=True)  # one of an earlier run would pass for ours
    profiler.export_chrome_trace(str(path))
    path.stat()


def _ended_early(first: int, last: int, done: int) -> str:
    if done < first:
        return f"the script ended before step {first} was over: the trace holds what there was of it."
    return f"the script ended after step {done}: the trace ends there, not after step {last}."
