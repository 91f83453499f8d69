"""Counting: a dispatch mode that sees every operator torch runs, forward and backward, and books it where it belongs.

    operator --> its formula (products, elementwise) --> Work
                 which phase?   in no backward pass                            forward
                                in one, inside a module called in it, or
                                with gradients on (it rebuilds a graph)        again (recomputation)
                                in one, otherwise                              backward
                 which place?   the module at work; in backward the module that made the node of the graph (`places`)

Operators that consist of others (`aten.matmul` in inference mode) are taken apart. What hooks on parameters do (accumulating
a gradient, averaging it over ranks) is no part of the model and is not counted; what is outside of its modules neither.

[Note: overhead] The mode costs microseconds per operator. It notes how long it took itself, and clocks of modules leave that
out, so that times are nearly those without it.

[Note: second derivatives] A backward pass whose graph is kept may be one that makes a graph itself (`create_graph`), with
gradients on. In such a pass only what runs inside modules is taken for a recomputation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.profiling.flops_profiler.elementwise import elementwise_formula
from deepspeed.profiling.flops_profiler.places import IGNORED, OUTSIDE, ROOT, Places
from deepspeed.profiling.flops_profiler.products import product_formula
from deepspeed.profiling.flops_profiler.work import Formula, Work, first_tensor

__all__ = ["Counter", "Phase", "Tally", "load_what_counting_needs"]

_NO_NUMBER = 1 << 63
"""Sequence numbers from here on are those of nodes that accumulate gradients."""


class Phase(Enum):
    """When an operator runs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    AGAIN = "computed again"


@dataclass
class Tally:
    """What one place did itself, without the places below."""

    macs: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))
    flops: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))
    seconds: float = 0.0
    """In forward."""

    def add(self, phase: Phase, macs: int, others: int) -> None:
        """Book one operator."""
        self.macs[phase] += macs
        self.flops[phase] += 2 * macs + others


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while entered, and keeps its numbers afterwards; may be entered again and then goes on.

    Args:
        model: whose modules are told apart.
        ignored: types of modules that are not counted.
        synchronize: waits for the device; called before the clock is read.
        clock_seconds: a monotonic clock.

    Attributes:
        places: of the model.
        tallies: one for each place.
        uncounted: names of operators without a formula, with the number of their calls.
        overhead_seconds: what counting has taken itself. [Note: overhead]
    """

    supports_higher_order_operators = True
    knows_mkldnn_products = True
    """`ops.host_products` asks: its operator has a formula, so it need not step back."""

    def __init__(
        self,
        model: nn.Module,
        ignored: Sequence[type] = (),
        synchronize: Callable[[], None] = lambda: None,
        clock_seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = Places(model, ignored, self._charge)
        self.tallies = [Tally() for _ in self.places.paths]
        self.uncounted: dict[str, int] = {}
        self._formulas: dict[Any, Formula | None] = {}
        self._taken_apart: dict[Any, bool] = {}
        self._synchronize = synchronize
        self._clock_seconds = clock_seconds
        self.overhead_seconds = 0.0
        self._last_seconds = 0.0
        self._tasks: list[int] = []
        self._is_backward_scope = False

    def reset(self) -> None:
        """Set all numbers to zero."""
        self.tallies = [Tally() for _ in self.places.paths]
        self.places.calls = [0 for _ in self.places.paths]
        self.uncounted.clear()

    # -- operators ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator and book it."""
        began = self._clock_seconds()
        kwargs = kwargs or {}
        if self._is_taken_apart(func):
            with self:
                return func.decompose(*args, **kwargs)
        ready = self._clock_seconds()
        result = func(*args, **kwargs)
        done = self._clock_seconds()
        self._book(func, args, kwargs, result)
        self.overhead_seconds += ready - began + self._clock_seconds() - done
        return result

    def _is_taken_apart(self, func: Any) -> bool:
        known = self._taken_apart.get(func)
        if known is None:
            key = torch._C.DispatchKey.CompositeImplicitAutograd
            name = str(func.name()) if isinstance(func, torch._ops.OpOverload) else ""  # type: ignore[no-untyped-call]
            is_composite = bool(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
            known = is_composite and self._formula(func) is None
            self._taken_apart[func] = known
        return known

    def _formula(self, func: Any) -> Formula | None:
        if func not in self._formulas:
            packet = getattr(func, "_overloadpacket", func)
            self._formulas[func] = product_formula(packet) or elementwise_formula(func)
        return self._formulas[func]

    def _book(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        tensor = first_tensor(result)
        if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
            return
        formula = self._formula(func)
        if formula is None:
            self.uncounted[str(func)] = self.uncounted.get(str(func), 0) + 1
            return
        work = formula(args, kwargs, result)
        if work.macs or work.others:
            self._add(work)

    def _add(self, work: Work) -> None:
        place, phase = self._where()
        if place in (OUTSIDE, IGNORED):
            return
        tally = self.tallies[place]
        tally.add(phase, work.macs, work.others)
        if any(work.again):
            tally.add(Phase.AGAIN, *work.again)

    def _where(self) -> tuple[int, Phase]:
        places = self.places
        task = torch._C._current_graph_task_id()
        if task == -1:
            self._tasks.clear()
            if self._is_backward_scope and not places.stack:
                return ROOT, Phase.BACKWARD
            return places.current, Phase.FORWARD
        self._follow(task)
        if places.stack and places.stack[-1].task == task:
            return places.current, Phase.AGAIN
        node = torch._C._current_autograd_node()
        number = _NO_NUMBER if node is None else node._sequence_nr()
        if number >= _NO_NUMBER:
            return OUTSIDE, Phase.BACKWARD
        place = places.place_of_node(number, is_nested=len(self._tasks) > 1)
        is_rebuilt = torch.is_grad_enabled() and not torch._C._autograd._get_current_graph_task_keep_graph()
        if not is_rebuilt:  # [Note: second derivatives]
            return place, Phase.BACKWARD
        places.note_rebuilt(place)
        return place, Phase.AGAIN

    def _follow(self, task: int) -> None:
        """Know which backward passes are under way: one inside another runs through nodes of a recomputation."""
        if task in self._tasks:
            del self._tasks[self._tasks.index(task) + 1 :]
            return
        self._tasks.append(task)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._tasks.remove(task) if task in self._tasks else None)

    # -- scopes -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """What runs inside and in no module belongs to the model itself."""
        self.places.enter(ROOT)
        try:
            yield
        finally:
            self.places.leave()

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """What runs inside, in no module and in no backward pass, belongs to the model's backward."""
        self._is_backward_scope = True
        try:
            yield
        finally:
            self._is_backward_scope = False

    def _charge(self) -> None:
        """Charge the time since the last change to the place that was at work. [Note: overhead]"""
        if torch._C._current_graph_task_id() != -1:
            return  # times are those of forward
        self._synchronize()
        now = self._clock_seconds() - self.overhead_seconds
        place = self.places.current
        if place >= 0:
            self.tallies[place].seconds += now - self._last_seconds
        self._last_seconds = now


def load_what_counting_needs() -> None:
    """Let torch import what it imports when the first operator runs in a dispatch mode: seconds that are no model's."""
    with Counter(nn.Identity()):
        torch.ones(1).add_(1)
