"""The update of ZenFlow: the important elements now, the rest every few updates, behind training if asked.

    gradient shard --chosen elements--> ZenFlowSelectiveAdamW --> master, values            every update
             `-----all others---------> sum of the window                                   every update
    sum / updates of the window ------> CPU optimizer ----------> master, values            at the end of a window
                                   `--> CPU optimizer, behind --> staged master --merge-->  at the end of the next window

A staged master is a second copy of this rank's masters, a second sum takes the next window's gradients: so nothing that runs
behind is read or written by anybody else, and masters always are what the model computes with. The rest's kernel runs over
whole slices; what it computes at important elements is put aside (`_keeping`).

Who looks at state (`state_of`) waits for what runs behind, and finds the important elements' moments in their places, as
they are; with the sum, the choice and the counters (`kept_beside`) that is all that a resumed run needs. A save merges first
(`drain`): the run that saved and the one that resumes go on alike.

What does not live here: when something happens (`schedule`), the choice (`columns`), the kernels (`deepspeed.ops.adam`).

Source: ZenFlow (arXiv:2505.12242). The mean over the window, not the sum, is what the rest is updated with: as if its batch
were as many times as large.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from deepspeed.ops.adam.zenflow import ZenFlowSelectiveAdamW_stage3
from deepspeed.zero.flat import FlatGroup
from deepspeed.zero.master import MasterWeights, Slice
from deepspeed.zero.zenflow.columns import Columns
from deepspeed.zero.zenflow.moments import MOMENTS, change_hands, put_back
from deepspeed.zero.zenflow.rest import RestUpdate
from deepspeed.zero.zenflow.schedule import Progress, Rest, Schedule, is_ripe
from deepspeed.zero.zenflow.settings import ZenFlowSettings

__all__ = ["ZenFlowWeights"]

_SUM, _IMPORTANT, _STEP = "zenflow_sum", "zenflow_important", "zenflow_step"
_COUNTERS = {"updates": "zenflow_updates", "in_window": "zenflow_in_window", "since_choice": "zenflow_since_choice"}


class ZenFlowWeights(MasterWeights):
    """Masters that are updated by importance.

    Args:
        flats: as `MasterWeights`; of stages 1 to 3.
        optimizer: Adam or AdamW of this library, on host memory.
        settings: what the `zenflow` block asks for.
        **others: as `MasterWeights`.
    """

    def __init__(
        self, flats: Sequence[FlatGroup], optimizer: DeepSpeedCPUAdam, settings: ZenFlowSettings, **others: Any
    ) -> None:
        super().__init__(flats, optimizer, is_elementwise=True, **others)
        self._settings = settings
        self._schedule = Schedule(settings.window)
        self._columns = Columns(self.flats, settings.topk_ratio)
        self._number_of = {id(flat): number for number, flat in enumerate(self.flats)}
        self._positions: list[Tensor] | None = None
        """Of the important elements of each slice; None before the first choice."""

        self._is_of_matrix: list[Tensor] = []
        self._important = ZenFlowSelectiveAdamW_stage3(
            self._groups(),
            adam_w_mode=optimizer.adam_w_mode,
            offload=settings.keeps_state_on_host,
            device=self.flats[0].device if self.flats else None,
        )
        self._is_closed = False
        self._are_moments_out = False
        """Whether the important moments were put into their places for a reader, who may have changed them."""

        sets = 2 if settings.window.is_behind else 1
        self._sums = [[torch.zeros_like(s.master) for s in self.slices] for _ in range(sets)]
        self._rest = RestUpdate(optimizer, self.slices, settings)
        for flat in self.flats:
            flat.before_edit.add(self.drain)

    # -- the update ---------------------------------------------------------------------------------------------------

    @property
    def can_skip_on_device(self) -> bool:
        """Never: the host must know whether an update is made, since it counts them."""
        return False

    def step(self, factor: float | Tensor, found_inf: Tensor | None = None) -> None:
        """One update as the schedule has it. Collective over the shard axis; see `MasterWeights.step`."""
        assert found_inf is None  # never asked for: `can_skip_on_device`
        if self._schedule.is_full:
            super().step(factor)
            self._schedule.full()
            return
        factor = float(factor)
        if self._schedule.chooses:
            self._choose()
        self._take_moments_in()
        with self.rewriting():
            self._step_important(factor)
            self._add_up(factor)
            updates = self._schedule.progress.in_window + 1
            rest = self._schedule.finish(ripe=self._schedule.asks_for_ripeness and self._is_ripe(factor))
            if rest is not Rest.WAITS:
                self._update_rest(updates, is_behind=rest is Rest.BEHIND)
        for s in self.slices:
            s.flat.gradients.spend(s.start, s.stop)

    def _step_important(self, factor: float) -> None:
        self._important.param_groups = self._groups()
        self._important.step_on({s.param: self._gradient(s) for s in self.slices}, factor)
        for s, positions in zip(self.slices, self._chosen, strict=True):
            self._write_values(s, positions)

    def _add_up(self, factor: float) -> None:
        is_first = self._schedule.progress.in_window == 0
        for s, total, positions in zip(self.slices, self._sums[0], self._chosen, strict=True):
            grad = self._gradient(s)
            if is_first:
                total.copy_(grad).mul_(factor)
            else:
                total.add_(grad.to(total.device), alpha=factor)
            total.index_fill_(0, positions, 0.0)

    def _update_rest(self, updates: int, *, is_behind: bool) -> None:
        self._merge()
        if is_behind:
            self._rest.start(self._sums[0], 1.0 / updates)
            self._sums.reverse()
            return
        with self._keeping():
            self._rest.make(self._sums[0], 1.0 / updates)
        for s in self.slices:
            self._write_values(s)

    def _merge(self) -> None:
        """Let the model hold what an update behind training has given, if there is one. Inside `rewriting`."""
        staged = self._rest.finish()
        if staged is None:
            return
        with self._keeping():
            torch._foreach_copy_([s.master for s in self.slices], staged)
        for s in self.slices:
            self._write_values(s)

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Write whole masters inside; important elements stay what they are."""
        kept = [s.master.index_select(0, positions) for s, positions in zip(self.slices, self._chosen, strict=True)]
        yield
        for s, positions, values in zip(self.slices, self._chosen, kept, strict=True):
            s.master.index_copy_(0, positions, values)

    def _write_values(self, s: Slice, positions: Tensor | None = None) -> None:
        """Round masters into the model's values: those at `positions` (None: all)."""
        if s.values is s.master:
            return
        if s.values is None or s.flat.lends_values:
            s.flat.deliver_values(s.start, s.stop, s.master)
        elif positions is None:
            s.values.copy_(s.master)
        else:
            s.values.index_copy_(0, positions, s.master.index_select(0, positions).to(s.values.dtype))

    def _is_ripe(self, factor: float) -> bool:
        """Ask all ranks' sums. Collective over the shard axis."""
        squares = torch.zeros(2, dtype=torch.float64)
        for s, total, positions, is_of_matrix in zip(
            self.slices, self._sums[0], self._chosen, self._is_of_matrix, strict=True
        ):
            squares[0] += torch.linalg.vector_norm(total, dtype=torch.float64).square()
            grad = self._gradient(s)
            important = grad.index_select(0, positions[is_of_matrix].to(grad.device))
            squares[1] += torch.linalg.vector_norm(important, dtype=torch.float64).square().cpu() * factor**2
        if self.flats and self.flats[0].axis.size > 1:
            squares = squares.to(self.flats[0].device)
            comm.all_reduce(squares, group=self.flats[0].axis.group)
        rest, important_squares = squares.tolist()
        of_rest, of_important = self._columns.numels
        return is_ripe(rest, of_rest, important_squares, of_important, self._settings.auto_ratio)

    # -- the choice ---------------------------------------------------------------------------------------------------

    def _choose(self) -> None:
        """Choose anew; moments of elements that are dropped or taken change hands. Collective over the shard axis."""
        of_flats = self._columns.choose()
        chosen = [self._within(s, of_flats[self._number_of[id(s.flat)]]) for s in self.slices]
        for s, before, after in zip(self.slices, self._positions or chosen, chosen, strict=True):
            rest = self._rest.state(s)
            own = self._important.state.get(s.param) or {"step": rest["step"].clone()}
            if MOMENTS[0] in own:
                state = change_hands(rest, own, before, after, self._group(s))
            else:
                state = {**own, **{key: rest[key].view(-1)[after] for key in MOMENTS}}
            self._important.adopt(s.param, after, state)
        self._set_positions(chosen)

    def _within(self, s: Slice, positions: Tensor) -> Tensor:
        first, last = torch.searchsorted(positions, torch.tensor([s.start, s.stop])).tolist()
        return positions[first:last] - s.start

    def _set_positions(self, chosen: list[Tensor]) -> None:
        self._positions = chosen
        self._is_of_matrix = []
        for s, positions in zip(self.slices, chosen, strict=True):
            is_of_matrix = torch.zeros(s.numel, dtype=torch.bool)
            for f in self._columns.of_matrices(self._number_of[id(s.flat)], s.start, s.stop):
                begin = f.buffer_start - s.start
                is_of_matrix[begin : begin + f.numel] = True
            self._is_of_matrix.append(is_of_matrix[positions])

    # -- from outside -------------------------------------------------------------------------------------------------

    def state_of(self, s: Slice) -> dict[str, Any]:
        """State of one slice, all of it in its place; waits for what runs behind."""
        self._put_moments_out()
        return super().state_of(s)

    def _put_moments_out(self) -> None:
        self._rest.wait()
        if self._positions is not None and not self._are_moments_out:
            for s, positions in zip(self.slices, self._positions, strict=True):
                put_back(self.optimizer.state[s.param], self._important.state[s.param], positions)
            self._are_moments_out = True

    def _take_moments_in(self) -> None:
        if self._are_moments_out and self._positions is not None:
            for s, positions in zip(self.slices, self._positions, strict=True):
                whole, own = self.optimizer.state[s.param], self._important.state[s.param]
                moments = {key: whole[key].view(-1)[positions] for key in MOMENTS}
                self._important.adopt(s.param, positions, {**own, **moments})
        self._are_moments_out = False

    def kept_beside(self, s: Slice) -> dict[str, Any]:
        """Sum, choice and counters, for a checkpoint."""
        if self._is_closed:
            return {}
        progress = self._schedule.progress
        beside: dict[str, Any] = {key: getattr(progress, name) for name, key in _COUNTERS.items()}
        if self._positions is None:
            return beside
        number = self.slices.index(s)
        is_important = torch.zeros(s.numel, dtype=torch.uint8)
        is_important[self._positions[number]] = 1
        beside |= {_IMPORTANT: is_important, _STEP: float(self._important.state[s.param]["step"])}
        return beside | ({_SUM: self._sums[0][number]} if progress.in_window else {})

    def adopt_beside(self, beside: Mapping[Slice, Mapping[str, Any]]) -> None:
        """Go on as a checkpoint says; from the beginning where it has no word of ZenFlow."""
        self._rest.wait()
        self._important.state.clear()
        self._positions, self._are_moments_out = None, False
        first = next((each for each in beside.values() if _COUNTERS["updates"] in each), {})
        counters = {name: int(first[key]) for name, key in _COUNTERS.items() if key in first}
        self._schedule = Schedule(self._settings.window, Progress(**counters))
        if _IMPORTANT not in first:
            return
        chosen = [beside.get(s, {}).get(_IMPORTANT, torch.zeros(s.numel)).nonzero().view(-1) for s in self.slices]
        for s, positions, total in zip(self.slices, chosen, self._sums[0], strict=True):
            of_slice = beside.get(s, {})
            if _SUM in of_slice:
                total.copy_(of_slice[_SUM])
            state = self._rest.state(s)
            step = torch.full_like(state["step"], of_slice.get(_STEP, 0.0))
            moments = {key: state[key].view(-1)[positions] for key in MOMENTS}
            self._important.adopt(s.param, positions, {"step": step, **moments})
        self._set_positions(chosen)

    def drain(self) -> None:
        """Let the model hold what an update behind training has given. Collective over the shard axis; for free without."""
        if self._rest.is_started:
            with self.rewriting():
                self._merge()

    def _adopt(self, flat: FlatGroup, edited: Sequence[int]) -> None:
        """What the caller has written wins over an update that runs behind."""
        super()._adopt(flat, edited)
        if self._rest.is_started:
            self._rest.overrule(self._touching(flat, edited))

    def _touching(self, flat: FlatGroup, edited: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """(number of the slice, first and last element of it) for this rank's parts of the parameters at `edited`."""
        for position in edited:
            for part in flat.own_parts(position):
                for number, s in enumerate(self.slices):
                    low, high = max(part.buffer_start, s.start), min(part.buffer_start + part.numel, s.stop)
                    if s.flat is flat and low < high:
                        yield number, low - s.start, high - s.start

    def close(self) -> None:
        """End the thread; hand all moments to the wrapped optimizer, in its own terms. What ran behind is not merged."""
        self._rest.close()
        self._take_moments_in()
        for s, positions in zip(self.slices, self._positions or (), strict=False):
            rest, own = self.optimizer.state[s.param], self._important.state[s.param]
            change_hands(rest, own, positions, positions[:0], self._group(s))
        self._positions = None
        self._is_closed = True
        super().close()

    # -- small things -------------------------------------------------------------------------------------------------

    @property
    def _chosen(self) -> list[Tensor]:
        assert self._positions is not None  # the first update after the warm-up chooses
        return self._positions

    def _gradient(self, s: Slice) -> Tensor:
        return s.flat.gradients.shard(s.start, s.stop)

    def _group(self, s: Slice) -> dict[str, Any]:
        return self.optimizer.param_groups[s.flat.kind.group_index]

    def _groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups as they are now, over all slices."""
        return [
            {**group, "params": [s.param for s in self.slices if s.flat.kind.group_index == index]}
            for index, group in enumerate(self.optimizer.param_groups)
        ]
