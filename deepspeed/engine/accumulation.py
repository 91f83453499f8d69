"""Counting micro-batches, and the one answer to "is this the accumulation boundary?".

    micro_steps   0   1   2   3 | 4   5   6   7 |      gradient_accumulation_steps = 4
    boundary      .   .   .   x | .   .   .   x |      unless the caller sets it, or owns it altogether

Three modes, checked in this order:
  set        `set_boundary(bool)`: the caller's word holds until the next call (Accelerate sets it before every backward);
  unmanaged  `managed_gradient_accumulation: false`: every `step()` is a boundary, no backward knows whether it is one;
  counted    every `steps`-th micro-batch.

Windows are counted from an origin: it moves when the number of steps changes, or when a checkpoint of another rhythm is
loaded, so that the next window is whole.

The sum over a window is divided by `divisor` once, where the update is made. A backward with `scale_wrt_gas=False` says that
its loss is divided already. All backward calls of a window usually agree; where they do not, the later ones carry the
difference on their loss.
"""

from __future__ import annotations

from deepspeed.errors import UsageError


class Accumulation:
    """Micro-step counter of one engine."""

    def __init__(self, steps: int, *, is_managed: bool = True) -> None:
        self.steps = steps
        self.is_managed = is_managed
        self._micro_steps = 0
        self._origin = 0
        self._set: bool | None = None
        self._window_divisor: int | None = None

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far. A client may write it; windows are then counted from 0, as `micro_steps % steps` says."""
        return self._micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        self._micro_steps, self._origin = value, 0

    def advance(self, micro_batches: int = 1) -> None:
        """One micro-batch more, or several."""
        self._micro_steps += micro_batches

    def change_steps(self, steps: int) -> None:
        """Change the length of windows; micro-batches of the window that is open count towards the new length."""
        done = (self._micro_steps - self._origin) % self.steps
        self._origin = self._micro_steps - min(done, steps - 1)
        self.steps = steps

    def restart(self, micro_steps: int) -> None:
        """Go on from a checkpoint: `micro_steps` so far, and a whole window comes next."""
        self._micro_steps = self._origin = micro_steps
        self.close_window()

    def set_boundary(self, is_boundary: bool) -> None:
        """Take the caller's word for every micro-batch from now on.

        Raises:
            UsageError: in unmanaged mode, where every `step()` is a boundary already.
        """
        if not self.is_managed:
            raise UsageError(
                f"set_gradient_accumulation_boundary({is_boundary}) with managed_gradient_accumulation=false: every step() "
                "updates in that mode. Call step() only when you want an update, or drop managed_gradient_accumulation."
            )
        self._set = bool(is_boundary)

    @property
    def is_step_boundary(self) -> bool:
        """Whether `step()` called now updates the weights."""
        if self._set is not None:
            return self._set
        return not self.is_managed or (self._micro_steps - self._origin + 1) % self.steps == 0

    @property
    def is_inside_window(self) -> bool:
        """Whether there have been micro-batches since the last update that the next update will count."""
        return self.is_managed and self._set is None and (self._micro_steps - self._origin) % self.steps != 0

    @property
    def is_backward_boundary(self) -> bool:
        """Whether a backward that starts now is known to be the last before the update, so that it may reduce."""
        return self.is_managed and self.is_step_boundary

    def loss_factor(self, *, scale_wrt_gas: bool) -> float:
        """What the loss of a backward must be multiplied by so that dividing by `divisor` at the update is right."""
        wanted = self._steps_divisor if scale_wrt_gas else 1
        if self._window_divisor is None:
            self._window_divisor = wanted
        return self._window_divisor / wanted

    @property
    def divisor(self) -> int:
        """What this window's sum of gradients is divided by at the update."""
        return self._steps_divisor if self._window_divisor is None else self._window_divisor

    @property
    def _steps_divisor(self) -> int:
        return self.steps if self.is_managed else 1

    def drop_window(self) -> None:
        """What has been accumulated was dropped: the next micro-batch is the first of a whole window."""
        self._origin = self._micro_steps
        self.close_window()

    def close_window(self) -> None:
        """The update was made or skipped: the next backward opens a new window."""
        self._window_divisor = None
