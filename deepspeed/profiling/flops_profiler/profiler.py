"""The profiler: counts a model's operations between `start_profile` and `stop_profile`, and tells of them.

    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(inputs)                  # and, if wanted, backward: each counts for itself
    profiler.stop_profile()
    profiler.print_model_profile()
    profiler.end_profile()

Lives here: the published interface. Does not live here: counting (`counter`), text (`report`), the step of an engine
(`engine.profiled_step`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.profiling.flops_profiler.counter import Counter, load_what_counting_needs
from deepspeed.profiling.flops_profiler.numbers import (
    duration_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from deepspeed.profiling.flops_profiler.peaks import peak_flops_of
from deepspeed.profiling.flops_profiler.report import aggregated, full_report
from deepspeed.profiling.flops_profiler.summary import Row, StepFacts, rows

__all__ = ["FlopsProfiler", "get_model_profile", "get_module_duration", "get_module_flops", "get_module_macs"]

_BACK_REFERENCE = "_flops_profiler"
"""On each module between `start_profile` and `end_profile`: the profiler, for the `get_module_*` functions."""


class FlopsProfiler:
    """Profiles one model. Numbers stay until the next `start_profile` or `reset_profile`.

    Args:
        model: any module. What runs in none of its modules is not counted.
        ds_engine: its engine; used for the number of ranks in the report.
        recompute_fwd_factor: part of forward that runs again in backward, for the estimate of a step in the report.
        peak_flops: FLOPs per second that the device can do, for the share that was reached (MFU); None: what is known of
            the device (`peaks`).

    Attributes:
        step_facts: what the engine knows of a profiled step; None outside one.
    """

    def __init__(
        self,
        model: nn.Module,
        ds_engine: Any = None,
        recompute_fwd_factor: float = 0.0,
        peak_flops: float | None = None,
    ) -> None:
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.step_facts: StepFacts | None = None
        self._peak_flops = peak_flops
        self._counter: Counter | None = None
        self._ignored: tuple[type, ...] = ()
        self._running = contextlib.ExitStack()
        self.overhead_seconds = (0.0, 0.0)
        """What counting took itself: outside of backward, and in backward."""

    # -- life ---------------------------------------------------------------------------------------------------------

    def start_profile(self, ignore_list: Sequence[type] | None = None) -> None:
        """Count from now on, from zero, in this thread.

        Args:
            ignore_list: types of modules; neither they nor what runs inside them is counted.
        """
        self.prepare(ignore_list)
        self._running.enter_context(self.counting())

    def stop_profile(self) -> None:
        """Count no longer; numbers stay."""
        self._running.close()

    def reset_profile(self) -> None:
        """Begin again from zero."""
        if self._counter is not None:
            self._counter.reset()

    def end_profile(self) -> None:
        """Take everything off the model. The totals can still be read."""
        self._running.close()
        if self._counter is not None:
            self._counter.places.detach()
        for module in self.model.modules():
            module.__dict__.pop(_BACK_REFERENCE, None)

    def prepare(self, ignore_list: Sequence[type] | None = None) -> None:
        """Put hooks on the model and set the numbers to zero; `counting` then counts. For callers with phases of a step."""
        self.end_profile()
        self._ignored = tuple(ignore_list or ())
        self.overhead_seconds = (0.0, 0.0)
        load_what_counting_needs()
        self._counter = Counter(self.model, self._ignored, get_accelerator().synchronize)
        self._counter.places.attach()
        for module in self._counter.places.modules:
            module.__dict__[_BACK_REFERENCE] = self

    @contextlib.contextmanager
    def counting(self, *, in_model: bool = False, in_backward: bool = False) -> Iterator[None]:
        """Count what runs inside, in this thread and in backward passes that begin in it.

        Args:
            in_model: what runs in no module belongs to the model itself.
            in_backward: what runs in no module belongs to the model's backward.
        """
        counter = self._counted()
        before = counter.overhead_seconds
        with contextlib.ExitStack() as stack:
            stack.callback(self._note_overhead, before, in_backward)
            if _is_compiled(self.model):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if in_model:
                stack.enter_context(counter.in_model())
            if in_backward:
                stack.enter_context(counter.in_backward())
            stack.enter_context(counter)
            yield

    def _note_overhead(self, before: float, in_backward: bool) -> None:
        spent = self._counted().overhead_seconds - before
        forward, backward = self.overhead_seconds
        self.overhead_seconds = (forward, backward + spent) if in_backward else (forward + spent, backward)

    def _counted(self) -> Counter:
        if self._counter is None:
            raise UsageError(
                "this FlopsProfiler has counted nothing yet: call start_profile(), run the model, stop_profile()."
            )
        return self._counter

    # -- numbers ------------------------------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """Every module in its place, with all that is below it; the first is the model.

        Raises:
            UsageError: nothing was profiled yet.
        """
        return rows(self._counted())

    def get_total_flops(self, as_string: bool = False) -> Any:
        """FLOPs of forward, as a number or as text (`1.5 G`)."""
        flops = self.rows()[0].flops
        return number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-accumulates of forward."""
        macs = self.rows()[0].macs
        return macs_to_string(macs) if as_string else macs

    def get_total_backward_flops(self, as_string: bool = False) -> Any:
        """FLOPs of gradients; what was computed again for them is not in it."""
        flops = self.rows()[0].backward_flops
        return number_to_string(flops) if as_string else flops

    def get_total_recomputed_flops(self, as_string: bool = False) -> Any:
        """FLOPs that backward spent on computing again what forward had computed."""
        flops = self.rows()[0].again_flops
        return number_to_string(flops) if as_string else flops

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters of the model on this rank, whole and each once."""
        params = self.rows()[0].params
        return params_to_string(params) if as_string else params

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds that forward took."""
        seconds = self.rows()[0].seconds
        return duration_to_string(seconds) if as_string else seconds

    @property
    def uncounted(self) -> dict[str, int]:
        """Operators without a formula that ran, with the number of their calls."""
        return dict(self._counted().uncounted)

    @property
    def peak_flops(self) -> float | None:
        """FLOPs per second that the device can do in the format of the model's parameters; None: not known."""
        if self._peak_flops is not None:
            return self._peak_flops
        param = next(self.model.parameters(), None)
        if param is None or param.device.type == "meta":
            return None
        return peak_flops_of(get_accelerator().product_name(), param.element_size())

    # -- text ---------------------------------------------------------------------------------------------------------

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Write the report.

        Args:
            profile_step: number of the step, for the heading.
            module_depth: modules deeper than this are left out; -1: none are.
            top_modules: modules named at each depth of the summary.
            detailed: write the tree.
            output_file: where to; None: standard output. Folders on the way are made; an earlier file is replaced.
        """
        text = full_report(self, profile_step, module_depth, top_modules, detailed=detailed)
        if output_file is None:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            path = Path(output_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Write the modules with the most parameters, MACs and time at each depth up to `module_depth`."""
        sys.stdout.write(aggregated(self.rows(), module_depth, top_modules))


def _is_compiled(model: nn.Module) -> bool:
    """Compiled code hides operators, so it runs uncompiled while it is counted."""
    return any(getattr(m, "_compiled_call_impl", None) is not None or hasattr(m, "_orig_mod") for m in model.modules())


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type] | None = None,
    mode: Literal["forward", "generate"] = "forward",
) -> tuple[Any, Any, Any]:
    """Run a model once in evaluation mode and count it. Modules are afterwards in the mode that they were in.

    Args:
        model: any module; on the meta device or under `FakeTensorMode` nothing is computed.
        input_shape: of a single input of ones, made in the format and on the device of the first parameter.
        args: inputs by place, instead of `input_shape`.
        kwargs: inputs by name.
        print_profile: write the report.
        detailed: as the next two and `output_file`, see `FlopsProfiler.print_model_profile`.
        module_depth: depth of the report.
        top_modules: modules named at each depth.
        warm_up: runs before the counted one.
        as_string: give texts.
        output_file: where the report goes.
        ignore_modules: types of modules that are not counted.
        mode: call the model, or its `generate`.

    Returns:
        (FLOPs, MACs, parameters).

    Raises:
        ArgumentError: no inputs, or both ways of giving them; another mode.
    """
    run = _callee(model, mode)
    inputs = _inputs(model, input_shape, args, kwargs)
    profiler = FlopsProfiler(model)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for _ in range(warm_up):
            run(*inputs, **(kwargs or {}))
        profiler.start_profile(ignore_modules)
        run(*inputs, **(kwargs or {}))
        profiler.stop_profile()
        if print_profile:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
        return (
            profiler.get_total_flops(as_string),
            profiler.get_total_macs(as_string),
            profiler.get_total_params(as_string),
        )
    finally:
        profiler.end_profile()
        for module, training in modes:
            module.training = training


def _callee(model: nn.Module, mode: str) -> Callable[..., Any]:
    if mode not in ("forward", "generate"):
        raise ArgumentError(f'get_model_profile(mode={mode!r}): use "forward" or "generate".')
    return model if mode == "forward" else cast("Callable[..., Any]", model.generate)


def _inputs(
    model: nn.Module, input_shape: tuple[int, ...] | None, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Sequence[Any]:
    if input_shape is None:
        if not args and not kwargs:
            raise ArgumentError("get_model_profile() needs inputs: give input_shape, args or kwargs.")
        return args
    if args:
        raise ArgumentError("get_model_profile() was given input_shape and args. Give one of them.")
    like = next(model.parameters(), torch.empty(0))
    return (torch.ones(input_shape, dtype=like.dtype, device=like.device),)


def _row_of(module: nn.Module) -> Row:
    profiler = module.__dict__.get(_BACK_REFERENCE)
    if profiler is None:
        raise UsageError(
            f"this {type(module).__name__} is not being profiled: ask between start_profile() and end_profile() of a "
            "FlopsProfiler of a model that has it."
        )
    places = profiler._counted().places
    found: list[Row] = profiler.rows()
    return next(row for row, each in zip(found, places.modules, strict=True) if each is module)


def get_module_flops(module: nn.Module) -> int:
    """FLOPs of forward of a module under profile, with all that is below it."""
    return _row_of(module).flops


def get_module_macs(module: nn.Module) -> int:
    """Multiply-accumulates of forward of a module under profile, with all that is below it."""
    return _row_of(module).macs


def get_module_duration(module: nn.Module) -> float:
    """Seconds of forward of a module under profile, with all that is below it."""
    return _row_of(module).seconds
