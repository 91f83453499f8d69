"""Names for what an engine does, in traces of profilers: phases, gathers by unit, reductions by bucket.

    forward        the module, or a chunk of a pipeline's stage
    backward       autograd, and the reductions that end with it
    reduce 'a.weight', 'a.bias'      start of a bucket's reduction     reduce ..., wait      until it is there
    gather layers.3                  start of a unit's gather          gather ..., wait      until it is there
    receive        a pipeline's stage waits for an activation or a gradient
    step           the update

Each is a `torch.profiler.record_function`, and on devices that have them a range of the device's own profiler (NVTX).
Methods of the one engine and its parts are replaced for as long as the names are wanted (`replaced`): else there is nothing
to ask on the way.

Called by users as `engine.named_ranges()`, and by `traced_steps`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import nn
from torch.profiler import record_function

from deepspeed.accelerator import get_accelerator
from deepspeed.engine.parts import EngineParts
from deepspeed.engine.replaced import ReplacedMethods

__all__ = ["named_ranges"]


class _Engine(Protocol):
    """What of an engine is looked at."""

    module: nn.Module
    _parts: EngineParts


@contextlib.contextmanager
def named_ranges(engine: _Engine) -> Iterator[None]:
    """Name what `engine` does inside. Not collective; may be nested with other watchers."""
    methods = ReplacedMethods()
    try:
        _name_phases(engine, methods)
        _name_buckets(engine, methods)
        _name_units(engine, methods)
        yield
    finally:
        methods.restore()


def _name_phases(engine: _Engine, methods: ReplacedMethods) -> None:
    transport = getattr(engine, "_transport", None)
    if transport is None:
        methods.replace(engine, "forward", _in_range("forward"))
    else:
        methods.replace(engine.module, "forward_chunk", _in_range("forward"))
        for name in ("take", "take_gradient"):
            methods.replace(transport, name, _in_range("receive"))
    if engine._parts.reducer is not None:
        methods.replace(engine._parts.reducer, "drive", _in_range("backward"))
        methods.replace(engine, "_update", _in_range("step"))


def _name_buckets(engine: _Engine, methods: ReplacedMethods) -> None:
    reducer = engine._parts.reducer
    for bucket in () if reducer is None or reducer.axis.size == 1 else reducer.buckets:
        label = f"reduce {bucket.names()}"
        methods.replace(bucket, "launch", _in_range(label))
        methods.replace(bucket, "wait", _in_range(f"{label}, wait"))


def _name_units(engine: _Engine, methods: ReplacedMethods) -> None:
    coordinator = engine._parts.coordinator
    if coordinator is None:
        return

    def gathered(ending: str) -> Callable[..., Any]:
        def by(method: Callable[..., Any], unit: Any) -> Any:
            return _ranged(f"gather {unit.name or 'the model'}{ending}", method, unit)

        return by

    methods.replace(coordinator.pool, "_start", gathered(""))
    methods.replace(coordinator.pool, "_arrive", gathered(", wait"))


def _in_range(label: str) -> Callable[..., Any]:
    def by(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _ranged(label, method, *args, **kwargs)

    return by


def _ranged(label: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    accelerator = get_accelerator()
    accelerator.range_push(label)
    try:
        with record_function(label):
            return method(*args, **kwargs)
    finally:
        accelerator.range_pop()
