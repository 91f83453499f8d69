"""The optimizer that `deepspeed.initialize` returns: one update from reduced gradients to new weights.

    reduce (if backward has not), ties -> norm and non-finite check, one pass -> factor -> walk (`zero.master`) -> loss scale

        factor = 1 / (accumulation steps x loss scale)  x  min(1, clip / norm)                      (`zero.outcome`)

It looks like the torch optimizer it wraps (`param_groups`, `state`, `defaults`, ...), so that schedules and clients can read
and change rates; but the engine alone may step it.

Does not live here: the mean (`zero.reducer`), the walk (`zero.master`), when to step (`engine.engine`, which calls it).
Built by `engine.training`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.accelerator.late import LateNumber
from deepspeed.common.logging import get_logger
from deepspeed.common.wording import some
from deepspeed.config.offload import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.errors import UsageError
from deepspeed.precision.loss_scaler import DynamicLossScaler, LossScaler, NullScaler
from deepspeed.sharding import Span
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.absence import Absence, state_tensors
from deepspeed.zero.flat import FlatGroup
from deepspeed.zero.master import MasterWeights
from deepspeed.zero.norm import sum_of_squares, sum_over_shards, total
from deepspeed.zero.outcome import REQUESTED, Late, Outcome
from deepspeed.zero.reducer import GradientReducer
from deepspeed.zero.state_io import hand_back, put_all_away, whole_state_dict
from deepspeed.zero.ties import Ties

if TYPE_CHECKING:
    from deepspeed.zero.parameter_offload import ParameterOffload

logger = get_logger(__name__)

_NAMES_SHOWN = 3
_REDIRECTED = ("step", "zero_grad", "add_param_group")  # on the wrapped optimizer too: its owner may still hold it


class DeepSpeedOptimizer:
    """Base of every optimizer that an engine returns; clients test for it."""


def _no_engine() -> None:
    """What stands for an engine until there is one."""


class ZeroOptimizer(DeepSpeedOptimizer, Optimizer):
    """A torch optimizer over this rank's masters, stepped by the engine.

    Args:
        master: the walk; its `optimizer` is the torch optimizer that is wrapped.
        reducer: brings gradients to their mean over ranks.
        scaler: loss scale (`NullScaler` outside fp16).
        clip: largest global norm, 0 for none.
        gradient_multiplier: 1, or the number of data-parallel ranks where gradients are summed instead of averaged.
        skips_nonfinite: skip an update whose norm is infinite or NaN; off only where the config says so.
        divisor: what the gradient accumulated so far is divided by, asked anew each time.
        frozen: sharded parameters that nothing updates; `offload_states` moves them too.
        computes_norm: False leaves the norm out (`compute_grad_norm`); non-finite gradients are still noticed.
        ties: what other stages of a pipeline hold copies of; None: nothing.
        norm_axis: the ranks whose gradients together are those of the whole model; None: the shard axis.
        counts: whether this rank's gradients of a group count there; None: all do.
        copies: ranges of this rank's shard of a group that another rank counts; None: none.
        device: where collectives want tensors; None: where gradients belong.
    """

    parameter_offload: ParameterOffload
    """Only at stage 3 (`hasattr` tells): the hooks of sharded parameters, for clients that take them off for a while."""

    skip_step: bool
    """Set it between backward and step, on every rank, and that step is skipped as one of non-finite gradients is, but for
    the loss scale, which takes it for a good one. Engines that must move together so wait for each other. From stage 1 on
    one rank that sets it is enough; at stage 0 a step asks no other rank anything."""

    def __init__(
        self,
        master: MasterWeights,
        reducer: GradientReducer,
        scaler: LossScaler,
        *,
        divisor: Callable[[], int],
        clip: float = 0.0,
        gradient_multiplier: float = 1.0,
        skips_nonfinite: bool = True,
        computes_norm: bool = True,
        frozen: Sequence[FlatGroup] = (),
        ties: Ties | None = None,
        norm_axis: AxisGroup | None = None,
        counts: Callable[[FlatGroup], bool] | None = None,
        copies: Callable[[FlatGroup], Sequence[Span]] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._engine_step: Callable[[], Callable[[], bool] | None] = _no_engine
        # Optimizer.__init__ is not called: every attribute it would make is the wrapped optimizer's (see __getattr__).
        self.optimizer = master.optimizer
        self.master = master
        self.reducer = reducer
        self.loss_scaler = scaler
        self.clip = clip
        self.gradient_multiplier = gradient_multiplier
        self.skips_nonfinite = skips_nonfinite
        self.computes_norm = computes_norm
        self.divisor = divisor
        self.frozen = tuple(frozen)
        self.ties = ties or Ties()
        self.norm_axis = norm_axis or (master.flats[0].axis if master.flats else None)
        counted = self.ties.counted(master.flats)
        self._counted = tuple(flat for flat in counted if counts is None or counts(flat))
        self._copies = [(flat, copies(flat)) for flat in self._counted] if copies is not None else []
        self.device = device or (master.flats[0].device if master.flats else None)
        self.absence = Absence()
        self.outcome: Outcome | None = None
        self.skip_step = False
        self.read_late: Callable[[Tensor], Late] = LateNumber
        self._opt_called = True  # torch's schedulers ask whether step() was called; the engine's update does not call it
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self._client_attributes = {name: vars(self.optimizer).get(name) for name in _REDIRECTED}
        for name in _REDIRECTED:
            setattr(self.optimizer, name, getattr(self, name))
        for flat in master.flats:
            flat.optimizer = weakref.ref(self)

    def gradient_factor(self) -> float:
        """What turns the gradient buffers into the gradient of the mean loss, before clipping."""
        return self.gradient_multiplier / (self.divisor() * self.loss_scaler.scale)

    def update(self, step_number: int) -> Outcome:
        """Make one update, or skip it. Collective over the data-parallel ranks.

        Args:
            step_number: for the message of a skipped step.

        Returns:
            What becomes of it; known at once unless the device decides.

        Raises:
            NonFiniteError: values stay non-finite although the loss scale is at its floor; on all ranks together.
        """
        self.reducer.ensure_reduced()
        self.ties.reduce(self.master.flats)
        self.master.before_change()
        self.master.adopt_edits()
        outcome = self.outcome = self._judge()
        if self._host_decides(outcome):
            if outcome.has_overflow:
                self._report_skip(step_number, outcome)
                self.zero_grad()
            else:
                self.master.step(outcome.factor())
            self.loss_scaler.update(outcome.has_overflow and not outcome.is_requested)
        else:
            self.master.step(outcome.factor_on_device(), outcome.skip_on_device())
        for flat in self.master.flats:
            flat.gradients.close_window()
        self.reducer.close_window()
        return outcome

    def _judge(self) -> Outcome:
        """Collective over the norm's axis."""
        shards = [shard for flat in self._counted for shard in flat.gradients.shards()]
        if self.computes_norm or not shards:
            mine = sum_of_squares(shards)
        else:
            mine = torch.stack([total(shard).double() for shard in shards]).sum().abs()
        copies = [flat.gradients.shard(span.start, span.stop) for flat, spans in self._copies for span in spans]
        if self.computes_norm and copies:
            mine = (mine - sum_of_squares(copies)).clamp(min=0)
        if self.skip_step:
            mine = mine + REQUESTED
        mine = mine.to(self.device)  # gradients may be in host memory, which no collective of a device's reaches
        return Outcome(
            mine if self.norm_axis is None else sum_over_shards(mine, self.norm_axis),
            self.gradient_factor(),
            clip=self.clip,
            is_norm=self.computes_norm,
            skips_nonfinite=self.skips_nonfinite,
            read=self.read_late,
        )

    def _host_decides(self, outcome: Outcome) -> bool:
        needs_to_know = not isinstance(self.loss_scaler, NullScaler)
        can_skip = self.master.can_skip_on_device or not self.skips_nonfinite
        is_asked, self.skip_step = self.skip_step, False
        return outcome.is_known() or needs_to_know or not can_skip or is_asked

    def _report_skip(self, step_number: int, outcome: Outcome) -> None:
        if outcome.is_requested:
            logger.debug("step %d skipped on all ranks, as optimizer.skip_step asked.", step_number)
            return
        origin = self.reducer.nonfinite_origin()
        ranks = sorted({rank for each in origin.values() for rank in each})
        names = some(list(map(repr, origin)), _NAMES_SHOWN, "no single parameter (the norm itself overflows)")
        is_elsewhere = not origin and self.norm_axis is not None and self.norm_axis.size > self.reducer.axis.size
        if self.reducer.axis.rank == 0 and not is_elsewhere:  # another stage of the pipeline names them
            logger.warning(
                "step %d skipped on all ranks: the gradient of %s is not finite; brought by rank %s; loss scale %g.",
                step_number,
                names,
                ", ".join(map(str, ranks)) or "unknown",
                self.loss_scaler.scale,
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop accumulated gradients. `set_to_none` is accepted for torch's signature: the flat buffer always stays."""
        if self.reducer.is_running:  # an exception cut a backward short: what it has launched must not land later
            self.reducer.abandon()
        for flat in self.master.flats:
            flat.gradients.drop()

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refuse: the buffers were laid out, and the ranks agreed on them, when the engine was made."""
        raise UsageError(
            "optimizer.add_param_group() was called on an optimizer that belongs to an engine. Give initialize() an "
            "optimizer with all groups (rate 0 for those that start later), or destroy the engine, add it, initialize "
            "again; on several ranks at ZeRO stages 1 to 3 the optimizer's state then starts anew."
        )

    def serve(self, step: Callable[[], Callable[[], bool] | None]) -> None:
        """Let `step()` reach an engine.

        Args:
            step: a weak reference to what makes the engine's step and returns True, or returns False where no backward went
                before it.
        """
        self._engine_step = step

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """`engine.step()`, for clients that hold the optimizer alone (Lightning's Fabric); once after an `engine.backward`.

        Raises:
            UsageError: with a closure, or no `engine.backward` since the last step: stepping past the engine would miss the
                reduction, the clipping and the 16-bit weights.
        """
        made = self._engine_step()
        if closure is not None or made is None or not made():
            raise UsageError(
                f"optimizer.step({'' if closure is None else 'closure'}) was called on an optimizer that belongs to an "
                "engine, and no engine.backward() has gone before it since the last step. Call engine.backward(loss), then "
                "engine.step(): it reduces, unscales, clips, updates and moves the schedule at the accumulation boundary."
            )

    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum | str] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move training state to host memory until `reload_states`. Between two steps; each rank moves its own.

        Args:
            include: optim_states, hp_params, lp_params, lp_grads, contiguous_grad_buffer; None: all.
            device: "cpu".
            pin_memory: use page-locked memory there.
            non_blocking: let the copies overlap each other.

        Raises:
            ArgumentError: a device other than the host, or an unknown kind; nothing was moved.
        """
        self.master.before_change()
        tensors = state_tensors(self.master, (*self.master.flats, *self.frozen))
        self.absence.offload(tensors, include, device, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` moved."""
        self.absence.reload(non_blocking=non_blocking)

    # -- the wrapped optimizer, seen from outside ---------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """The current loss scale, 1 outside fp16."""
        return self.loss_scaler.scale

    cur_scale = loss_scale

    @property
    def global_norm(self) -> float | None:
        """Norm of the last update's gradient before clipping; None before the first, and where it is not computed."""
        return None if self.outcome is None else self.outcome.norm

    @property
    def overflow(self) -> bool:
        """Whether the last update was skipped: a gradient was not finite, or a client asked (`skip_step`)."""
        return self.outcome is not None and self.outcome.has_overflow

    def check_overflow(self, external: bool = False) -> bool:
        """Whether a gradient on any rank is not finite: of the step to come, or of the last one.

        Args:
            external: True, between backward and step: look at the gradients as they are. Collective, by all ranks of the
                engine; it reduces what backward has not, and the step that follows looks again. False: what the last step
                found (its own check is part of every step), not collective.
        """
        if not external:
            return self.overflow and not (self.outcome is not None and self.outcome.is_requested)
        self.reducer.ensure_reduced()
        shards = [shard for flat in self.master.flats for shard in flat.gradients.shards()]
        bad = torch.tensor(float(any(not math.isfinite(total(shard).item()) for shard in shards)), device=self.device)
        return bool((bad if self.norm_axis is None else sum_over_shards(bad, self.norm_axis)).item())

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts itself."""
        return isinstance(self.loss_scaler, DynamicLossScaler)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups; `params` are slices of the flat masters."""
        return self.optimizer.param_groups

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """This rank's masters, group after group: the flat slices that the wrapped optimizer steps."""
        return [each for group in self.param_groups for each in group["params"]]

    fp32_partitioned_groups_flat = single_partition_of_fp32_groups
    """The same by the name that clients read at stage 3."""

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state, keyed by slice; to be changed as you like, which a background save waits for."""
        self.master.before_change()
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state and the loss scale; checkpoints use `zero.state_io`, which knows names."""
        return {"optimizer": whole_state_dict(self.master), "loss_scaler": self.loss_scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of `state_dict`, for the same layout."""
        self.master.before_change()
        self.optimizer.load_state_dict(state_dict["optimizer"])
        put_all_away(self.master)
        self.loss_scaler.load_state_dict(state_dict["loss_scaler"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "optimizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"ZeroOptimizer({self.optimizer!r})"

    def release(self) -> None:
        """Let go of the model and give the wrapped optimizer back, parameters, state and methods: `engine.destroy()`."""
        self.reducer.remove()
        self.master.close()
        try:
            hand_back(self.master)
        finally:
            self.master.residence.close()
        for name, before in self._client_attributes.items():
            vars(self.optimizer).pop(name, None)
            if before is not None:
                setattr(self.optimizer, name, before)


ZeroOptimizer.step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch's schedules need not count its calls
