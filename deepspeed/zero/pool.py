"""Which units are whole now, within the budgets.

    use(unit)       wait for it if it is on its way, gather it if not; first make room
    leave(unit)     nobody uses it any more: keep or release
    prefetch()      start to gather what comes next
    release_all()   nothing is whole

    sharded --- use -----------------> in use --- leave, next use far or no room ---> sharded
       |                               ^  | ^
       `-- prefetch --> ahead -- use --'  | `---- use ------.
                                          `-- leave, near --> idle --- room needed ---> sharded

Lives here: carrying out what `zero.prefetch` decides, and counting elements. Does not live here: who uses a unit
(`zero.coordinator`, which calls this).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch

from deepspeed.comm.watch import naming
from deepspeed.common.logging import get_logger
from deepspeed.zero.prefetch import GatherSettings, Idle, Lookahead, choose_victims, should_keep
from deepspeed.zero.states import ShardState, Unit
from deepspeed.zero.trace import Trace

__all__ = ["Storages", "UnitPool"]

logger = get_logger(__name__)

_PLENTY = 1 << 30

Storages = dict[int, tuple[Unit, int] | None]
"""Storage (`untyped_storage()._cdata`) of a gathered buffer -> its unit and position there. None: memory that belongs to a
`GatheredParameters` block."""


class _Pass:
    """One kind of pass over the model: training, which ends with an update, or evaluation, which repeats as it is."""

    def __init__(self, numels: list[int], settings: GatherSettings, *, wraps: bool) -> None:
        self.trace = Trace(numels, wraps=wraps)
        self.lookahead = Lookahead(self.trace, numels, settings)


class _Buffers:
    """Buffers of the tier, counted while units to be gathered ahead are chosen."""

    def __init__(self, units: list[Unit], free: int) -> None:
        self._units = units
        self._free = free

    def take(self, number: int) -> bool:
        """Whether there are as many as the unit needs; then they are taken."""
        needed = self._units[number].away_pieces
        if needed > self._free:
            return False
        self._free -= needed
        return True


class UnitPool:
    """The units of one model, and how many of their elements are gathered.

    Args:
        units: by number.
        settings: the budgets.
    """

    def __init__(self, units: Iterable[Unit], settings: GatherSettings) -> None:
        self.units: list[Unit] = list(units)
        self.settings = settings
        self.live_numel = 0
        """Elements of the buffers of all units that are gathered or on their way."""
        self.storages: Storages = {}
        self.lingering: dict[Unit, None] = {}
        """Units in use by autograd, as far as is known: released only when nothing else is left to release."""
        self.before_change: Callable[[Unit], None] = lambda unit: None
        """Called when the parameters of a unit are about to be shown or hidden."""
        self.after_change: Callable[[Unit], None] = lambda unit: None
        """Called when the parameters of a unit were shown or hidden."""
        self.free_buffers: Callable[[], int] = lambda: _PLENTY
        """Buffers through which shards that rest outside memory can be read now without waiting for an earlier read."""
        self._numels = [unit.numel for unit in self.units]
        self._total_numel = sum(self._numels)
        self._gathered: dict[Unit, None] = {}
        self._ahead_numel = 0
        training = _Pass(self._numels, settings, wraps=False)
        self._passes = {True: training, False: _Pass(self._numels, settings, wraps=True)}
        self._pass = training

    def add(self, unit: Unit) -> None:
        """Take one more unit in; its number is the next one."""
        self.units.append(unit)
        self._numels.append(unit.numel)
        self._total_numel += unit.numel

    def clear(self) -> None:
        """Forget every unit: they are not sharded any more."""
        self.units.clear()
        self._gathered.clear()
        self.lingering.clear()
        self.storages.clear()
        self.forget_order()

    # -- passes -------------------------------------------------------------------------------------------------------

    def enter_pass(self, *, is_training: bool) -> None:
        """What is used from now on belongs to a pass of this kind."""
        if self._pass is not self._passes[is_training]:
            self._pass = self._passes[is_training]
            self._pass.lookahead.restart()  # units were gathered and released without its knowing

    @property
    def is_training(self) -> bool:
        """Whether the current pass is one that builds a graph."""
        return self._pass is self._passes[True]

    @property
    def knows_order(self) -> bool:
        """Whether a whole pass of the current kind was recorded."""
        return self._pass.trace.is_known

    def forget_order(self) -> None:
        """Expect nothing of the passes to come. All ranks call it: what is gathered ahead is gathered together."""
        for known in self._passes.values():
            known.trace.forget()
            known.lookahead.restart()

    def close_pass(self) -> None:
        """The current pass is over; the next one of its kind is expected to be like it."""
        if self._pass.trace.close() and self.settings.logs_changes:
            logger.warning(
                "units were used in another order than in the pass before: the new order is recorded, and until its end "
                "parameters may have been gathered late. A model whose order keeps changing trains, but without prefetch."
            )
        self._pass.lookahead.restart()
        for unit in self.units if self._ahead_numel else ():  # foreseen, but not used
            if unit.state is ShardState.GATHERING:
                self.bring(unit)
                self.leave(unit)

    # -- use ----------------------------------------------------------------------------------------------------------

    def use(self, unit: Unit) -> None:
        """Make `unit` whole. The caller counts itself in `unit.users`, or calls `leave` some time later."""
        self._pass.trace.use(unit.number)
        if unit.state is not ShardState.GATHERED or (not unit.users and unit.is_stale()):
            self.bring(unit)

    def bring(self, unit: Unit) -> None:
        """Make `unit` whole, outside the recorded order of uses."""
        with outside_inference_mode():
            if unit.state is ShardState.GATHERING:
                self._ahead_numel -= unit.numel
                self._arrive(unit)
            if unit.state is ShardState.GATHERED and unit.is_stale():
                self.release(unit)
            if unit.state is ShardState.SHARDED:
                self._make_room(unit.numel)
                self._start(unit)
                self._arrive(unit)

    def _start(self, unit: Unit) -> None:
        with naming(unit.label):
            unit.gather()
        self.live_numel += unit.numel

    def _arrive(self, unit: Unit) -> None:
        self.before_change(unit)
        with naming(unit.label):
            unit.wait()
        self._gathered[unit] = None
        self._note_storages(unit)
        self.after_change(unit)

    def _note_storages(self, unit: Unit) -> None:
        for position, buffer in enumerate(unit.buffers):
            if buffer.numel():
                self.storages[buffer.untyped_storage()._cdata] = (unit, position)

    def _forget_storages(self, unit: Unit) -> None:
        for buffer in unit.buffers:
            self.storages.pop(buffer.untyped_storage()._cdata, None)

    def prefetch(self) -> None:
        """Start to gather what is used next, within the budget."""
        chosen = self._pass.lookahead.choose(
            self._ahead_numel, self._is_here, self._make_room_beyond, _Buffers(self.units, self.free_buffers()).take
        )
        if chosen:
            with outside_inference_mode():
                for number in chosen:
                    self._start(self.units[number])
                    self._ahead_numel += self.units[number].numel

    def _is_here(self, number: int) -> bool:
        return self.units[number].state is not ShardState.SHARDED

    # -- release ------------------------------------------------------------------------------------------------------

    def leave(self, unit: Unit) -> None:
        """Nobody uses `unit` any more."""
        if unit.state is not ShardState.GATHERED:
            return
        if unit.is_outdated or not should_keep(self._distance(unit), self.live_numel, self.settings):
            self.release(unit)

    def release(self, unit: Unit) -> None:
        """Give up a gathered unit."""
        self._forget(unit)
        self._pass.lookahead.released(unit.number)
        self.before_change(unit)
        try:
            with outside_inference_mode():
                unit.release()
        finally:
            self.after_change(unit)

    def _forget(self, unit: Unit) -> None:
        self._gathered.pop(unit, None)
        self.lingering.pop(unit, None)
        self._forget_storages(unit)
        self.live_numel -= unit.numel

    def settle(self) -> None:
        """Wait for everything that is on its way."""
        for unit in self.units:
            if unit.state is ShardState.GATHERING:
                self.bring(unit)

    def release_all(self) -> None:
        """Give up every unit that no running module uses, and the others once none does; shards may change then.

        What is on its way is waited for first.
        """
        self.settle()
        for unit in [*self._gathered]:
            if unit.users:
                unit.is_outdated = True
                self._separate(unit)
            else:
                self.release(unit)

    def _separate(self, unit: Unit) -> None:
        self._forget_storages(unit)
        self.before_change(unit)
        with outside_inference_mode():
            unit.separate()
        self._note_storages(unit)
        self.after_change(unit)

    def refresh(self, unit: Unit) -> None:
        """The shards of a settled `unit` have other values: bring it up to date where it is used, else release it."""
        if unit.state is ShardState.GATHERED:
            self.release(unit)
            if unit.users:
                self.bring(unit)

    def keep(self, unit: Unit) -> None:
        """Make `unit` whole for good; it leaves the pool."""
        self.bring(unit)
        self._forget(unit)
        with outside_inference_mode():
            unit.keep()

    def _distance(self, unit: Unit) -> int | None:
        if self._pass.trace.is_known:
            return self._pass.trace.distance(unit.number)
        # The first pass: a graph is being built, so backward will come back within twice the model.
        return 2 * self._total_numel if torch.is_grad_enabled() else None

    def _make_room(self, numel: int) -> None:
        """Release what is needed last until `numel` more elements fit, or nothing idle is left."""
        if self.live_numel + numel > self.settings.max_live_numel:
            self._release_idle(numel, -1)
        if self.settings.packs_saved:  # else autograd counts on parameters that are there
            for unit in [*self.lingering]:
                if self.live_numel + numel <= self.settings.max_live_numel:
                    return
                if not unit.users and unit.state is ShardState.GATHERED:
                    self.release(unit)

    def _make_room_beyond(self, numel: int, distance: int) -> bool:
        """Make room by releasing only what is used later than `distance` elements from now; whether that was enough."""
        if self.live_numel + numel > self.settings.max_live_numel:
            self._release_idle(numel, distance)
        return self.live_numel + numel <= self.settings.max_live_numel

    def _release_idle(self, numel: int, beyond: int) -> None:
        idle = [
            Idle(unit.number, unit.numel, self._distance(unit))
            for unit in self._gathered
            if not unit.users and unit not in self.lingering
        ]
        excess = self.live_numel + numel - self.settings.max_live_numel
        for number in choose_victims(idle, excess, beyond):
            self.release(self.units[number])


@contextlib.contextmanager
def _out_of_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def outside_inference_mode() -> contextlib.AbstractContextManager[None]:
    """Memory allocated inside may be used in training, whatever mode the caller is in."""
    return _out_of_inference_mode() if torch.is_inference_mode_enabled() else _HERE


_HERE = contextlib.nullcontext()
