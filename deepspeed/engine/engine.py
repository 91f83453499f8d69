"""The engine: owns everything after the forward.

    loss = engine(batch)      the user's module, under autocast where asked for
    engine.backward(loss)     x loss scale; autograd; gradients become their mean over ranks at the boundary  (zero.reducer)
    engine.step()             at the boundary: norm, unscale, clip, update, schedule, report; else it only counts

Everything that is chosen is chosen in `engine.build` and handed in; this file is the story of a step.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.accelerator import get_accelerator
from deepspeed.comm import watch
from deepspeed.common.logging import get_logger, warn_once
from deepspeed.common.pytree import map_tensors
from deepspeed.common.timing import NullTimer
from deepspeed.engine.config_access import ConfigAccess
from deepspeed.engine.loading import LoadingMembers
from deepspeed.engine.members import CompatibleMembers
from deepspeed.engine.named_ranges import named_ranges
from deepspeed.engine.parts import EngineParts
from deepspeed.engine.report import BACKWARD, BACKWARD_ALLREDUCE, BACKWARD_INNER, FORWARD, STEP
from deepspeed.engine.saving import SavingMembers
from deepspeed.engine.step_summary import StepSummary
from deepspeed.engine.undecided import UndecidedStep
from deepspeed.engine.whole_model import WholeModelMembers
from deepspeed.errors import ArgumentError, UnbuiltFeatureError, UsageError
from deepspeed.zero.sanity import agree, held_alike
from deepspeed.zero.small import withdraw_small

logger = get_logger(__name__)

_GC_EVERY_STEPS = 100
_NO_TIMER = NullTimer()  # for evaluations: the time of a step is that of its own micro-batches
_STOPPED = (
    "backward stopped half way (%s), so some gradients have a part of this micro-batch. To go on, call engine.zero_grad() "
    "and repeat the batch from its first micro-batch."
)
_NO_OPTIMIZER = "on an engine without an optimizer. Give initialize() an optimizer to train."


class DeepSpeedEngine(ConfigAccess, CompatibleMembers, SavingMembers, LoadingMembers, WholeModelMembers, nn.Module):
    """A model with its optimizer, schedule and data, trained over all ranks as one process would train it.

    Made by `deepspeed.initialize`. `engine.module` is the user's module, the same object. A name that the engine does not
    have is looked up on the module.
    """

    def __init__(self, parts: EngineParts) -> None:
        super().__init__()
        self.module = parts.module
        self._parts = parts
        self._config = parts.config
        self.optimizer = parts.optimizer
        self.lr_scheduler = parts.lr_scheduler
        self.training_dataloader = parts.dataloader
        self.global_steps = self.global_samples = self._skipped_steps = 0
        self._was_step_applied = False
        self._undecided: UndecidedStep | None = None
        self._in_no_sync = False
        self._awaits_step = self._is_stopped = self._stepped_for_optimizer = False
        if self.optimizer is not None:
            self.optimizer.serve(weakref.WeakMethod(self._step_for_optimizer))
        self.resumed_from: str | None = None
        """Path of the checkpoint that `elasticity.auto_resume` found; None: training starts at its beginning."""
        self.resumed_client_state: dict[str, Any] | None = None
        """The client state in it."""

    # -- one micro-batch ----------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Inputs in any container; the module's own output object comes back."""
        parts = self._parts
        self._require_present("engine.forward()")
        if parts.reducer is not None and parts.reducer.is_running:
            parts.reducer.abandon()  # an exception had cut the last backward short
        report = parts.report
        report.mark("before forward")
        if self.training:
            report.throughput.start()
        with report.timers(FORWARD) if self.training and torch.is_grad_enabled() else _NO_TIMER:
            if parts.input_dtype is not None:
                args, kwargs = map_tensors(self._cast_input, args), map_tensors(self._cast_input, kwargs)
            if self.training:
                self._stepped_for_optimizer = False
                parts.same_inputs.check(args, kwargs)
            with self._autocast(), self._gathering(), parts.products():
                output = self.module(*args, **kwargs)
        report.mark("after forward")
        return output

    def _gathering(self) -> contextlib.AbstractContextManager[Any]:
        coordinator = self._parts.coordinator
        return contextlib.nullcontext() if coordinator is None else coordinator.forward_scope()

    def _require_present(self, what: str) -> None:
        if self.optimizer is not None:
            self.optimizer.absence.require_present(what)

    def _cast_input(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._parts.input_dtype) if tensor.is_floating_point() else tensor

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        block, device_type = self._config.torch_autocast, self._parts.device.type
        if block.enabled:
            return torch.autocast(device_type, dtype=self._parts.autocast_dtype)
        if torch.is_autocast_enabled(device_type):
            warn_once(
                "outer autocast",
                "torch.autocast around the engine is switched off inside it, because the config does not enable "
                "torch_autocast. Enable that block instead of wrapping the call.",
            )
            return torch.autocast(device_type, enabled=False)
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **kwargs: Any) -> Tensor:
        """Compute gradients of `loss`; at the accumulation boundary they become the mean over ranks.

        Collective over the data-parallel ranks at a boundary.

        Args:
            loss: scalar with a graph.
            retain_graph: as in `Tensor.backward`.
            scale_wrt_gas: divide by the accumulation steps; False when the caller has divided already.
            **kwargs: passed on to `Tensor.backward`.

        Returns:
            The loss, divided by the accumulation steps unless `scale_wrt_gas` is False; without a graph.

        Raises:
            ArgumentError: no optimizer, or a loss that is not a scalar with a graph.
        """
        parts = self._parts
        if parts.reducer is None:
            raise ArgumentError(f"engine.backward() {_NO_OPTIMIZER}")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ArgumentError(
                f"engine.backward() needs a scalar loss with a graph, got {_describe(loss)}. Reduce it (for example "
                "loss.mean()) and make sure it was computed with gradients enabled."
            )
        self._require_present("engine.backward()")
        report, timers, accumulation = parts.report, parts.report.timers, parts.accumulation
        divisor = accumulation.steps if accumulation.is_managed else 1
        scaled = parts.loss_guard.scale(loss, accumulation.loss_factor(scale_wrt_gas=scale_wrt_gas))
        report.add_loss(loss, 1.0 if scale_wrt_gas else float(divisor))
        report.mark("before backward")
        if accumulation.is_step_boundary:
            parts.same_inputs.ask()

        def autograd() -> None:
            torch.autograd.backward(scaled, retain_graph=retain_graph, **kwargs)
            timers(BACKWARD_INNER).stop()
            timers(BACKWARD_ALLREDUCE).start()

        try:
            with timers(BACKWARD):
                timers(BACKWARD_INNER).start()
                parts.reducer.drive(autograd)
                timers(BACKWARD_ALLREDUCE).stop()
        except BaseException as error:  # an interrupt too: in a notebook people go on after it
            self._is_stopped = True
            for name in (BACKWARD_INNER, BACKWARD_ALLREDUCE):
                timers(name).abandon()
            logger.warning(_STOPPED, type(error).__name__)
            raise
        self._awaits_step, self._stepped_for_optimizer = True, False
        report.mark("after backward")
        return loss.detach() / divisor if scale_wrt_gas and divisor != 1 else loss.detach()

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` with the fp16 loss scale on it, for `engine.scale(loss).backward()`; the same loss outside fp16."""
        return self._parts.loss_guard.scale(loss)

    # -- the update ---------------------------------------------------------------------------------------------------

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Count the micro-batch; at the accumulation boundary update the weights and move the schedule.

        Call on every micro-batch, on every rank. Collective over the data-parallel ranks at a boundary.

        Args:
            lr_kwargs: keyword arguments for the schedule's `step`.

        Raises:
            ArgumentError: no optimizer, or inside `no_sync()`.
            NonFiniteError: values stay non-finite although the loss scale is at its floor.
        """
        if self.optimizer is None:
            raise ArgumentError(f"engine.step() {_NO_OPTIMIZER}")
        if self._in_no_sync:
            raise ArgumentError("engine.step() inside engine.no_sync(). Leave the context first: a step reduces gradients.")
        self._require_present("engine.step()")
        if self._stepped_for_optimizer:
            raise UsageError(
                "engine.step() after optimizer.step(), which was engine.step() already, with no forward or backward between "
                "them. Call one of the two."
            )
        self._awaits_step = False
        parts = self._parts
        is_boundary = parts.accumulation.is_step_boundary
        if is_boundary:
            self._update(lr_kwargs or {})
        else:
            self._settle()
            self._was_step_applied = False
        parts.accumulation.advance()
        parts.report.throughput.stop(global_step=is_boundary)

    def _step_for_optimizer(self) -> bool:
        """`step()`, asked for by `optimizer.step()`; False, and nothing is done, without a backward before it."""
        if not self._awaits_step:
            return False
        self.step()
        self._stepped_for_optimizer = True
        return True

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        parts = self._parts
        assert self.optimizer is not None  # step() asked
        self._settle()
        self._refuse_changed_freezing()
        parts.same_inputs.before_update()
        with parts.report.timers(STEP):
            parts.report.mark("before step")
            if parts.coordinator is not None:
                parts.coordinator.before_update()
            outcome = self.optimizer.update(self.global_steps + 1)
            self._undecided = UndecidedStep(outcome, self.lr_scheduler, self.optimizer)
            is_known = outcome.is_known()
            if is_known:
                self._settle()
            if self.lr_scheduler is not None and (not is_known or self._was_step_applied):
                self.lr_scheduler.step(**lr_kwargs)
            for param in parts.unmanaged:
                param.grad = None
            parts.accumulation.close_window()
            parts.loss_guard.reset()
            if self._config.zero_optimization.enable_sanity_checks:
                self._check_sanity()
            self.global_steps += 1
            watch.set_step(self.global_steps + 1)
            self.global_samples += parts.batch.train
        parts.report.mark("after step")
        self._report()
        parts.checkpointing.saver.at_boundary(lambda: self._pieces(exclude_frozen=False))
        if self._config.disable_python_gc and self.global_steps % _GC_EVERY_STEPS == 0:
            self.collect_python_gc()

    def _check_sanity(self) -> None:
        flats, mesh = self._parts.partition.flats, self._parts.mesh
        agree(list(held_alike(flats)), mesh.zero_group)
        if mesh.axis("expert").size > 1:
            agree(list(held_alike(flats, of_experts=True)), mesh.expert_zero_group, told=mesh.zero_group)
        if mesh.axis("tensor").size > 1:
            agree(list(held_alike(flats, of_parts=False)), mesh.axis("tensor"), told=mesh.stage_ranks)

    def _settle(self) -> None:
        """Book the last update as made or skipped. Waits for the device if nobody has asked before."""
        if self._undecided is not None:
            undecided, self._undecided = self._undecided, None
            self._was_step_applied = not undecided.outcome.has_overflow
            if not self._was_step_applied:
                self._skipped_steps += 1
                undecided.take_back()

    @property
    def skipped_steps(self) -> int:
        """Updates that were skipped: for non-finite gradients, or as `optimizer.skip_step` asked."""
        self._settle()
        return self._skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, value: int) -> None:
        self._settle()
        self._skipped_steps = value

    def _refuse_changed_freezing(self) -> None:
        """Which parameters train is settled at the start: their masters and buffers were made then."""
        assert self.optimizer is not None  # step() asked
        thawed = [name for name, param in self._parts.frozen.items() if param.requires_grad]
        flats = self.optimizer.master.flats
        frozen = [member.name for flat in flats for member in flat.members if not member.param.requires_grad]
        if thawed or frozen:
            raise UsageError(
                f"requires_grad was changed after initialize(): now trains {thawed[:3]}, now is frozen {frozen[:3]}. Call "
                "engine.destroy() and initialize() again with the new set; a checkpoint carries the state over."
            )

    def _report(self) -> None:
        report = self._parts.report
        report.step_ended(self.global_steps)
        if report.is_due(self.global_steps):
            report.step_done(
                StepSummary(
                    global_step=self.global_steps,
                    global_samples=self.global_samples,
                    skipped_steps=self.skipped_steps,
                    lr=self.get_lr(),
                    mom=self.get_mom(),
                    loss_scale=self._parts.loss_guard.loss_scale,
                    grad_norm=self.get_global_grad_norm(),
                    loss=report.mean_loss(),
                )
            )
        report.log_timers(self.global_steps)
        report.close_window()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every accumulated gradient; after a backward that was stopped, its batch begins anew."""
        self._parts.require_owned()
        if self._is_stopped:
            self._is_stopped = self._awaits_step = False
            self._parts.accumulation.drop_window()
            self._parts.loss_guard.reset()
            self._parts.report.close_window()
            for name in (FORWARD, BACKWARD, BACKWARD_INNER, BACKWARD_ALLREDUCE, STEP):
                self._parts.report.timers(name).reset()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        for param in self._parts.unmanaged:
            param.grad = None

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the weights: False between boundaries and for a skipped step."""
        self._settle()
        return self._was_step_applied

    # -- accumulation -------------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last before the update."""
        return self._parts.accumulation.is_step_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say for every micro-batch from now on whether it is the last before the update."""
        self._parts.accumulation.set_boundary(is_boundary)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the next one outside reduces what they left.

        Raises:
            ArgumentError: entered twice.
        """
        if self._in_no_sync:
            raise ArgumentError("engine.no_sync() inside engine.no_sync(). One level is enough.")
        self._in_no_sync = True
        try:
            with self.coalesce_grad_reduction():
                yield
        finally:
            self._in_no_sync = False

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backward passes, one reduction: at `step()`, or at the next backward outside."""
        reducer = self._parts.reducer
        if reducer is None:
            yield
            return
        before, reducer.sync_enabled = reducer.sync_enabled, False
        try:
            yield
        finally:
            reducer.sync_enabled = before

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce what has been accumulated, now. Collective. `bucket_size` is accepted; buckets were planned at start."""
        if self._parts.reducer is not None:
            self._parts.reducer.reduce()

    def named_ranges(self) -> contextlib.AbstractContextManager[None]:
        """Name what the engine does inside, for `torch.profiler` and NVTX: phases, gathers by unit, reductions by bucket.

        Nothing of it is on the way outside. See docs/guide/traces.md.
        """
        return named_ranges(self)

    # -- life ---------------------------------------------------------------------------------------------------------

    def compile(self, backend: Any = None, compile_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Compile the module in place; parameter names stay as they are.

        Raises:
            UnbuiltFeatureError: `schedule` or `compiled_autograd_enabled`, which belong to features not built yet.
        """
        asked = [name for name, value in kwargs.items() if value]
        if asked:
            raise UnbuiltFeatureError(f"engine.compile({', '.join(asked)}=...) is not built yet. Leave it out.")
        self.module.compile(backend=backend or get_accelerator().get_compile_backend(), **(compile_kwargs or {}))
        self._is_compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether `compile()` was called."""
        return bool(self.__dict__.get("_is_compiled", False))

    def destroy(self) -> None:
        """Take hooks off and free gradient buffers; the module keeps its weights and may be wrapped again.

        Each rank calls it when it likes. Sharded parameters become whole when one of them is used for the first time, on
        all ranks together; those that rest in files (`offload_param` to NVMe) become whole here, which is then collective.
        Waits for a save in the background.

        Raises:
            CheckpointError: that save failed; the engine is taken apart all the same.
        """
        try:
            self._parts.checkpointing.saver.close()
        finally:
            self._take_apart()

    def _take_apart(self) -> None:
        parts, optimizer = self._parts, self.optimizer
        with ExitStack() as stack:  # the last one first; each whatever becomes of those before
            if self._config.disable_python_gc:
                stack.callback(gc.enable)
            stack.callback(parts.report.log.end)
            stack.callback(parts.report.monitor.close)
            stack.callback(withdraw_small, self.module.parameters(), parts.small)
            for flat in parts.partition.frozen:
                stack.callback(flat.release)
            if optimizer is not None:
                stack.callback(optimizer.release)
            if parts.coordinator is not None:
                stack.callback(parts.coordinator.retire)
            if optimizer is not None:
                stack.callback(optimizer.reload_states)
            self.optimizer, self._parts = None, parts.without_training()

    def collect_python_gc(self) -> None:
        """Run Python's cyclic collector; with `disable_python_gc` this is the only time it runs."""
        gc.collect()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"neither {type(self).__name__} nor the wrapped module has an attribute {name!r}")


def _describe(loss: Any) -> str:
    if not isinstance(loss, Tensor):
        return f"a {type(loss).__name__}"
    return f"a tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
