"""The update of everything that is not important: at once in the masters, or behind training in staged ones.

    make      masters <-- optimizer, sums x factor                  the caller waits
    start     staged  <-- copy of the masters, then the same        a thread; sums and state are its own until `finish`
    finish    the staged masters                                    waits for the thread

Lives here: the call of the optimizer and its thread. Does not live here: which elements of the result count
(`zero.zenflow.weights`, the only caller).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.common.worker import Worker, thread_share
from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from deepspeed.ops.host_step import Update
from deepspeed.zero.walk import Slice
from deepspeed.zero.zenflow.moments import MOMENTS
from deepspeed.zero.zenflow.settings import ZenFlowSettings

__all__ = ["RestUpdate"]


class RestUpdate:
    """Steps the wrapped optimizer with sums of gradients."""

    def __init__(self, optimizer: DeepSpeedCPUAdam, slices: Sequence[Slice], settings: ZenFlowSettings) -> None:
        self._optimizer = optimizer
        self._slices = slices
        self._staged = [torch.empty_like(s.master) for s in slices] if settings.window.is_behind else []
        self._worker = Worker("zenflow step", thread_share(1.0 - settings.reserved_share))
        self.is_started = False
        """Whether there is an update that `finish` has not given yet."""

    def state(self, s: Slice) -> dict[str, Any]:
        """State of one slice, made where there is none yet."""
        state: dict[str, Any] = self._optimizer.state[s.param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for key in MOMENTS:
                state[key] = torch.zeros_like(s.master)
        return state

    def make(self, sums: Sequence[Tensor], factor: float) -> None:
        """Update all masters now, with gradients `sums` x `factor`; the sums are spent."""
        assert not self.is_started  # one update at a time: they share state
        self._stepper([s.master for s in self._slices], sums).run(factor)

    def start(self, sums: Sequence[Tensor], factor: float) -> None:
        """Begin the same for staged masters, with hyperparameters as they are now."""
        assert not self.is_started
        stepper = self._stepper(self._staged, sums)
        masters = [s.master for s in self._slices]

        def work() -> None:
            torch._foreach_copy_(self._staged, masters)
            stepper.run(factor)

        self.is_started = True
        self._worker.submit(work)

    def wait(self) -> None:
        """Block until nothing runs; what was started stays to be finished. Raises the thread's error."""
        self._worker.join()

    def finish(self) -> list[Tensor] | None:
        """The staged masters of what was started, once; None where nothing was."""
        if not self.is_started:
            return None
        self.wait()
        self.is_started = False
        return self._staged

    def overrule(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        """Let the masters as they are now be the result in `ranges`: (number of a slice, first and last element)."""
        self.wait()
        for number, first, last in ranges:
            self._staged[number][first:last] = self._slices[number].master[first:last]

    def close(self) -> None:
        """End the thread; what was started is not given any more."""
        self._worker.close()
        self.is_started = False

    def _stepper(self, masters: Sequence[Tensor], sums: Sequence[Tensor]) -> _Stepper:
        return _Stepper(self._optimizer, self._slices, masters, sums, [self.state(s) for s in self._slices])


class _Stepper:
    """One step of a copy of the optimizer: hyperparameters of now, state shared, other tensors as parameters."""

    def __init__(
        self,
        optimizer: DeepSpeedCPUAdam,
        slices: Sequence[Slice],
        masters: Sequence[Tensor],
        sums: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
    ) -> None:
        params = [nn.Parameter(master.detach(), requires_grad=False) for master in masters]
        of_group: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        for s, param in zip(slices, params, strict=True):
            of_group[s.flat.kind.group_index].append(param)
        groups = [{**group, "params": own} for group, own in zip(optimizer.param_groups, of_group, strict=True)]
        self._optimizer = DeepSpeedCPUAdam(groups, adamw_mode=optimizer.adam_w_mode)
        self._optimizer.state.update(zip(params, states, strict=True))
        self._params, self._masters, self._sums = params, masters, sums

    def run(self, factor: float) -> None:
        """Step once with gradients x `factor`."""
        dtypes = {master.dtype for master in self._masters}
        if self._optimizer.can_step_in_one_pass(torch.device("cpu"), *dtypes):
            updates = map(Update, self._params, self._masters, self._sums)
            self._optimizer.step_in_one_pass(list(updates), factor)
            return
        for param, total in zip(self._params, self._sums, strict=True):
            param.grad = total.mul_(factor)
        self._optimizer.step()
