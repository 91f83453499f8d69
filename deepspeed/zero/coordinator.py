"""Stage 3 while it runs: every unit is whole while its module computes, and in nobody's memory otherwise.

                     forward                                            backward
    unit 0  ..[ gather ][ module runs ]..............................[ gather ][ gradients ]....
    unit 1  ............[ gather ahead ][ module runs ][ kept, because used again soon ][ gradients ]..

    before_forward    use the unit and what it borrows; start what comes next             zero.pool
    after_forward     nobody uses it: keep or release; put hooks on the outputs
    look-up           a parameter used outside its module: use its unit until the running module ends
    before_backward   an output's gradient is there: use the unit; start what comes next
    unpack            autograd reads a saved weight: gather it if nothing above has       zero.saved
    bucket_reduced    its gradients have arrived: keep or release
    backward_over     everything that is still in use by backward is not any more
    before_update     nothing is whole; the recorded order of uses is complete            zero.trace
    before_edit       nothing is whole, in the middle of a step

Hooks, recorded order and prefetch make it fast. Results do not rest on them: a look-up and an unpack gather what they need.
All ranks run the same modules in the same order, or the gatherer must be one that is not collective.

Lives here: which moment means what, and who uses a unit. Does not live here: budgets and memory (`zero.pool`), one unit's
life cycle (`zero.states`), whole values for the user (`zero.private`). Called by `engine` and `zero.reducer`; hooks call the
rest.

[Note: a pass outside the engine] A module of the model may be called without the engine (`engine.module.head(y)`). The first
unit that runs then opens a scope of its own, unless hooks on saved tensors are in force already, as those of a checkpoint:
recomputing has to save the same tensors as the first run, and happens in backward, where no scope is opened.

[Note: neighbours] Tiny neighbours in a list are one unit, in use from the start of the first to the end of the last. In a
scope that is a frame, which the end of the scope ends at the latest. Outside one, and in backward, where some may run
without the others, the unit lingers instead: the next scope, the end of backward or lack of room takes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.common.logging import get_logger
from deepspeed.zero.external import external_parameters_of
from deepspeed.zero.holder import holder_of, set_holder
from deepspeed.zero.hooks import UnitHooks
from deepspeed.zero.lookups import unwatch_lookups, watch_lookups
from deepspeed.zero.pool import UnitPool
from deepspeed.zero.prefetch import GatherSettings
from deepspeed.zero.private import PrivateCopies
from deepspeed.zero.retired import retire
from deepspeed.zero.saved import SavedTensors
from deepspeed.zero.states import (
    Launch,
    Piece,
    ShardedFlat,
    ShardState,
    Unit,
    gather_by_all_reduce,
    gather_by_gatherer,
    one_at_a_time,
    pieces_by_unit,
)
from deepspeed.zero.units import UnitPlan

__all__ = ["ParameterCoordinator", "build_coordinator"]

logger = get_logger(__name__)

_current_backward: Callable[[], int] = torch._C._current_graph_task_id  # -1 outside a backward of this thread


def build_coordinator(
    root: nn.Module,
    plans: Sequence[UnitPlan],
    flats: Iterable[ShardedFlat],
    settings: GatherSettings,
) -> ParameterCoordinator:
    """Make the coordinator of `root` and put its hooks on.

    Args:
        root: the model.
        plans: its units, as `plan_units` made them.
        flats: its flat groups; each member's `unit` is the number of its plan. Those that are not sharded are passed over.
        settings: the budgets.
    """
    launch: Launch = gather_by_all_reduce if settings.by_all_reduce else gather_by_gatherer
    launch = one_at_a_time(launch) if settings.is_sequential else launch
    pieces = pieces_by_unit(list(flats))
    units = [
        Unit(plan.number, plan.name, plan.modules, pieces.get(plan.number, ()), launch, is_whole=plan.is_whole)
        for plan in plans
    ]
    by_param = {id(param): unit for unit in units for param in unit.params}
    for plan, unit in zip(plans, units, strict=True):
        unit.externals = dict.fromkeys(by_param[id(param)] for param in plan.borrowed)
    pool = UnitPool(units, settings)
    stages = {id(piece.flat.tier.stage): piece.flat.tier.stage for u in units for piece in u.pieces if piece.flat.tier}
    if stages:
        pool.free_buffers = lambda: min(stage.free_count for stage in stages.values())
    return ParameterCoordinator(root, pool, by_param)


class _Frame:
    """One unit's module while it runs."""

    __slots__ = ("close_scope", "pins", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.pins: list[Unit] = []
        """Units that the module uses, its own among them: they stay as long as it runs."""
        self.close_scope: Callable[[], None] | None = None
        """Ends the scope that was opened for this module."""


class _Call:
    """What one forward of a unit leaves behind for its backward."""

    __slots__ = ("backward", "pins")

    def __init__(self, pins: list[Unit]) -> None:
        self.pins = pins
        self.backward = -1
        """The latest backward that came by: it comes once for each output."""


class ParameterCoordinator:
    """Keeps the sharded parameters of one model; see the module's docstring. Implements `zero.holder.ParameterHolder`.

    Use `build_coordinator`. Not safe for forwards of one model in several threads at a time.
    """

    def __init__(self, root: nn.Module, pool: UnitPool, units: dict[int, Unit]) -> None:
        self.root = root
        self.pool = pool
        self.hooks = UnitHooks(self)
        self._units = units
        self._frames: list[_Frame] = []
        self._scope_pins: list[Unit] = []
        self._depth = 0
        self._is_removed = False
        self._stand_ins: list[tuple[Unit, Piece]] = []
        self._buckets = {(piece.flat, piece.number): unit for unit in pool.units for piece in unit.pieces}
        self._by_module = {module: unit for unit in pool.units for module in unit.modules}
        self._tiers = {id(piece.flat): tier for unit in pool.units for piece in unit.pieces if (tier := piece.flat.tier)}
        self._saved = SavedTensors(pool.storages, self._late_use)
        self._private = PrivateCopies(pool, units)
        pool.before_change = self._adopt
        pool.after_change = self._repoint
        for module in root.modules():
            for param in external_parameters_of(module):
                self.register_external(module, param)
        self.hooks.install(pool.units)
        watch_lookups(root, units, self.looked_up)
        for unit in pool.units:
            for param in unit.params:
                set_holder(param, self)

    @property
    def live_numel(self) -> int:
        """Elements gathered or on their way, padding included."""
        return self.pool.live_numel

    # -- forward ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def forward_scope(self) -> Iterator[None]:
        """Run the model inside. Saved weights are packed, look-ups gather; may be nested."""
        close = self._open(may_replace_hooks=True)
        try:
            yield
        finally:
            close()

    def _open(self, *, may_replace_hooks: bool) -> Callable[[], None]:
        """Begin a scope; call the result to end it."""
        if not self._depth and _current_backward() == -1:
            self._refuse_lost()
            self._unwind(0)
            self.backward_over()
            self.pool.enter_pass(is_training=torch.is_grad_enabled())
        packs = self.pool.settings.packs_saved and (may_replace_hooks or not _has_saved_hooks())
        if packs:
            self._saved.push()
        self._depth += 1
        return partial(self._close, packs)

    def _close(self, packs: bool) -> None:
        if packs:
            self._saved.pop()
        self._depth -= 1
        if not self._depth:
            self._unwind(0)
            pins, self._scope_pins = self._scope_pins, []
            self._unpin(pins)
            if not self.pool.is_training and _current_backward() == -1:
                self.pool.close_pass()

    def before_forward(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The first module of `unit` is about to run."""
        is_first = not self._depth and not self._frames
        if len(unit.modules) > 1 and (is_first or _current_backward() != -1 or self._frame_of(unit) is not None):
            self._use_neighbours(unit)
        else:
            frame = _Frame(unit)
            if is_first and _current_backward() == -1:
                frame.close_scope = self._open(may_replace_hooks=False)  # [Note: a pass outside the engine]
            self._frames.append(frame)
            self._pin(unit, frame.pins)
            for other in unit.externals:
                self._pin(other, frame.pins)
        self.pool.prefetch()
        if unit.trained_pieces < len(unit.pieces) and torch.is_grad_enabled():
            for tensor in _tensors((args, kwargs)):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self.after_backward, unit))  # type: ignore[no-untyped-call]

    def _use_neighbours(self, unit: Unit) -> None:
        """[Note: neighbours]."""
        if not self._depth and not self._frames and _current_backward() == -1:
            self.pool.enter_pass(is_training=torch.is_grad_enabled())
        self.pool.use(unit)
        self.pool.lingering[unit] = None

    def after_forward(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The last module of `unit` has run, or raised."""
        depth = self._frame_of(unit)
        if depth is None:  # [Note: neighbours], or an earlier hook raised so that ours did not run
            self._watch_outputs([unit], len(self._frames), output)
            return
        frame = self._frames[depth]
        try:
            self._watch_outputs(frame.pins, depth, output)
            self._unwind(depth)
        finally:
            if frame.close_scope is not None:
                frame.close_scope()

    def _frame_of(self, unit: Unit) -> int | None:
        return next((n for n in range(len(self._frames) - 1, -1, -1) if self._frames[n].unit is unit), None)

    def _pin(self, unit: Unit, pins: list[Unit]) -> None:
        self.pool.use(unit)
        unit.users += 1
        pins.append(unit)

    def _unwind(self, depth: int) -> None:
        """End all frames from `depth` on; those above the one that ends were left by an exception."""
        while len(self._frames) > depth:
            self._unpin(self._frames.pop().pins)

    def _unpin(self, pins: Iterable[Unit]) -> None:
        """A running module is done with `pins`."""
        pool = self.pool
        # Backward comes next when this is a recomputation; and what autograd has not packed it may read from the parameter.
        lingers = _current_backward() != -1 or (not pool.settings.packs_saved and torch.is_grad_enabled())
        for unit in pins:
            unit.users -= 1
            if unit.users:
                continue
            if lingers:
                pool.lingering[unit] = None
            elif unit not in pool.lingering:
                pool.leave(unit)

    def _watch_outputs(self, pins: list[Unit], depth: int, output: Any) -> None:
        builds_graph = torch.is_grad_enabled()
        if not builds_graph and type(output) is Tensor:
            return
        call = _Call(pins)
        for tensor in (output,) if type(output) is Tensor else _tensors(output):
            owner = self._units.get(id(tensor))
            if owner is not None:
                self._hand_on(owner, depth)
            elif builds_graph and tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._output_grad, call))  # type: ignore[no-untyped-call]

    def _hand_on(self, owner: Unit, depth: int) -> None:
        """A module returns a sharded parameter: its unit stays while the caller runs."""
        if depth:
            self._pin(owner, self._frames[depth - 1].pins)
        else:
            self.pool.lingering[owner] = None

    def looked_up(self, unit: Unit) -> None:
        """A parameter of `unit` was read from its module while no running module uses the unit."""
        if self._frames:
            user = self._frames[-1]
            self._pin(unit, user.pins)
            if user.unit.is_whole:  # a module around other units may use it much later: there the trace foresees it
                user.unit.externals[unit] = None
        elif _current_backward() != -1:
            self._late_use(unit)
        elif self._depth:
            self._pin(unit, self._scope_pins)

    # -- backward -----------------------------------------------------------------------------------------------------

    def _output_grad(self, call: _Call, grad: Tensor) -> None:
        backward = _current_backward()
        if call.backward != backward:
            call.backward = backward
            self.before_backward(call)

    def before_backward(self, call: _Call) -> None:
        """The gradient of an output of `call` is there."""
        pool = self.pool
        pool.enter_pass(is_training=True)
        for unit in call.pins:
            pool.use(unit)
            pool.lingering[unit] = None
        pool.prefetch()

    def _late_use(self, unit: Unit) -> None:
        """Backward needs `unit` now."""
        if unit.state is not ShardState.GATHERED:
            self.pool.use(unit)
            self.pool.lingering[unit] = None

    def after_backward(self, unit: Unit, grad: Tensor) -> None:
        """The gradient of an input of `unit` is there."""
        self._done(unit)

    def before_accumulate(self, unit: Unit, piece: Piece, index: int, grad: Tensor) -> None:
        """The gradient of a parameter is about to be stored: autograd looks at the parameter's shape and strides.

        A parameter that is released shows a single element in its whole shape until its unit changes or backward is over.
        """
        param = piece.members[index].param
        if unit.state is not ShardState.GATHERED and id(param) not in unit.fetched:
            param.data = piece.flat.new_whole(1).zero_()[0].expand(piece.shapes[index])
            self._stand_ins.append((unit, piece))

    def bucket_reduced(self, flat: ShardedFlat, number: int) -> None:
        """Bucket `number` of `flat` needs its parameters no more: all gradients have arrived and were copied."""
        unit = self._buckets.get((flat, number))
        if unit is None:
            return
        unit.reported += 1
        if unit.reported >= unit.trained_pieces == len(unit.pieces):
            self._done(unit)

    def _done(self, unit: Unit) -> None:
        unit.reported = 0
        if not unit.users and unit in self.pool.lingering:
            del self.pool.lingering[unit]
            self.pool.leave(unit)

    def backward_over(self) -> None:
        """Backward has ended: what only it used is kept or released as the budgets say. May be called at any time."""
        lingering = [*self.pool.lingering]
        self.pool.lingering.clear()
        for unit in lingering:
            unit.reported = 0
            if not unit.users:
                self.pool.leave(unit)
        for unit, piece in self._stand_ins:
            if unit.state is not ShardState.GATHERED:
                piece.flat.hide(piece.number)
                self._private.point(unit)
        self._stand_ins.clear()

    def before_update(self) -> None:
        """The optimizer is about to change values: nothing is whole, and the pass is over. All ranks call it."""
        self.backward_over()
        self.before_edit()
        self.pool.enter_pass(is_training=True)
        self.pool.close_pass()

    def before_edit(self) -> None:
        """Values are about to change outside a step: what is gathered is released, as soon as no running module uses it.

        Backward refuses graphs that were built before, as autograd refuses tensors changed in place. All ranks call it.
        """
        self._refuse_lost()
        self.release_all()
        for unit in self.pool.units:
            unit.age()

    # -- parameters used elsewhere ------------------------------------------------------------------------------------

    def register_external(self, module: nn.Module, param: nn.Parameter) -> None:
        """Gather the unit of `param` whenever `module` runs. A parameter that is not sharded here is passed over."""
        unit = self._units.get(id(param))
        if unit is None:
            return
        guest = self._by_module.get(module)
        if guest is None:
            name = next((name for name, other in self.root.named_modules() if other is module), type(module).__name__)
            guest = Unit(len(self.pool.units), name, (module,), (), gather_by_gatherer, is_whole=True)
            self.pool.add(guest)
            self._by_module[module] = guest
            if self.hooks.are_on:
                self.hooks.install([guest])
        if guest is not unit:
            guest.externals[unit] = None

    def unregister_external(self, module: nn.Module, param: nn.Parameter) -> None:
        """Undo `register_external`."""
        guest, unit = self._by_module.get(module), self._units.get(id(param))
        if guest is not None and unit is not None:
            guest.externals.pop(unit, None)

    # -- whole values for the user ------------------------------------------------------------------------------------

    def fetch(self, params: Sequence[nn.Parameter]) -> None:
        """See `ParameterHolder`."""
        self._refuse_lost()
        self._private.fetch(params)

    def drop(self, params: Sequence[nn.Parameter]) -> None:
        """See `ParameterHolder`."""
        self._private.drop(params)

    def store(self, params: Sequence[nn.Parameter], source_rank: int) -> None:
        """See `ParameterHolder`."""
        self._private.store(params, source_rank)

    def _adopt(self, unit: Unit) -> None:
        if unit.fetched:
            self._private.adopt(unit)

    def _repoint(self, unit: Unit) -> None:
        if unit.fetched:
            self._private.point(unit)

    def _refuse_lost(self) -> None:
        """Raise when an error has made values unknown: nothing can go on, on any rank."""
        for tier in self._tiers.values():
            tier.check_usable()

    # -- end ----------------------------------------------------------------------------------------------------------

    def release_all(self) -> None:
        """Release every unit that no running module uses."""
        self.pool.release_all()

    def remove(self, *, gather: bool = True) -> None:
        """Take hooks and look-ups off. The coordinator has no units from then on, so what it is still asked for is nothing.

        Args:
            gather: make every parameter whole, in memory of its own (collective over the shard axis); else they stay empty.
                They do as well when the tier that they rest on has failed.
        """
        if self._is_removed:  # a newer engine may have put its own look-ups on
            return
        self._take_off()
        try:
            if any(tier.is_broken for tier in self._tiers.values()):
                logger.warning(
                    "parameters rested in a file that could not be read or written, so they stay empty. Build the model "
                    "anew and load a checkpoint."
                )
            else:
                self.release_all()
                for unit in self.pool.units if gather else ():
                    self.pool.keep(unit)
        finally:
            self._give_up_params()
            self._forget()

    def retire(self) -> None:
        """The same, but parameters become whole when the first of them is used, and only that is collective.

        Where there is nobody to wait for, and where they rest in files that are to be removed, they become whole now.
        """
        if self._is_removed:
            return
        flats = {id(piece.flat): piece.flat for unit in self.pool.units for piece in unit.pieces}.values()
        if self._tiers or all(flat.axis.size == 1 for flat in flats):
            self.remove()
            return
        self._take_off()
        self.release_all()
        self._give_up_params()
        for flat in flats:
            flat.retains_values = True
        retire([param for unit in self.pool.units for param in unit.params], partial(self._make_whole, [*flats]))

    def _make_whole(self, flats: Sequence[ShardedFlat]) -> None:
        for unit in self.pool.units:
            self.pool.keep(unit)
        self._forget()
        for flat in flats:
            flat.close_values()

    def _take_off(self) -> None:
        self._is_removed = True
        self._unwind(0)
        self.hooks.remove()
        unwatch_lookups(self.root)
        self._private.close()

    def _give_up_params(self) -> None:
        for unit in self.pool.units:
            for param in unit.params:
                if holder_of(param) is self:
                    set_holder(param, None)

    def _forget(self) -> None:
        self.pool.clear()
        self._stand_ins.clear()
        for known in (self._units, self._by_module, self._buckets, self._tiers):
            known.clear()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None: parameters refer to their holder, and a saved one has none."""
        return type(None), ()


def _has_saved_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in `tree`: containers, data classes and named tuples of them, nested."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (tuple, list, set)):
        for value in tree:
            yield from _tensors(value)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from _tensors(getattr(tree, field.name, None))
