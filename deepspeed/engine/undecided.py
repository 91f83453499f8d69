"""An update of which the host does not know yet whether it was made: what has to be taken back if it was not.

The schedule moves on as if it had been made; a skipped update (rare) puts it where it was. Called by `engine.engine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed.common.logging import get_logger

if TYPE_CHECKING:
    from deepspeed.zero.optimizer import ZeroOptimizer
    from deepspeed.zero.outcome import Outcome

__all__ = ["UndecidedStep"]

logger = get_logger(__name__)


class UndecidedStep:
    """Made before the schedule moves."""

    def __init__(self, outcome: Outcome, schedule: Any, optimizer: ZeroOptimizer) -> None:
        self.outcome = outcome
        self._schedule = schedule
        self._optimizer = optimizer
        is_known = outcome.is_known()
        self._state = None if is_known or schedule is None else dict(schedule.state_dict())
        self._rates = None if is_known else [dict(group, params=None) for group in optimizer.param_groups]

    def take_back(self) -> None:
        """The update was skipped: schedule and hyperparameters are again what they were."""
        if self._rates is None:
            return
        if not self.outcome.is_requested:
            logger.warning("the last step was skipped on all ranks: its gradients were not finite.")
        if self._state is not None:
            self._schedule.load_state_dict(self._state)
        for group, before in zip(self._optimizer.param_groups, self._rates, strict=True):
            group.update((key, value) for key, value in before.items() if key != "params")
