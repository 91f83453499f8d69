"""RepeatingLoader: a loader without end, each pass in the order of the next epoch.

Does not live here: where a pass begins (`loader`, `sampler`). Called by user scripts; the engine never needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

from deepspeed.errors import UsageError


class RepeatingLoader:
    """Begin `loader` again whenever it ends, with its sampler (or itself) told the next epoch.

    Args:
        loader: can be iterated again and again.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter: Iterator[Any] | None = None

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        """Length of one pass."""
        if not isinstance(self.loader, Sized):
            raise TypeError(f"a {type(self.loader).__name__} has no length, so neither has its RepeatingLoader")
        return len(self.loader)

    def __next__(self) -> Any:
        """Return the next element; never ends.

        Raises:
            UsageError: a whole pass gave nothing.
        """
        # A pass that was begun may be at its end; a second one that gives nothing shows that there is nothing.
        for _ in range(2):
            if self.data_iter is None:
                self.data_iter = iter(self.loader)
            for element in self.data_iter:
                return element
            self.data_iter = None
            self._next_epoch()
        raise UsageError(
            f"the {type(self.loader).__name__} gave nothing in a whole pass. Check that its dataset is not empty, and that "
            "drop_last does not leave out all it has."
        )

    def state_dict(self) -> dict[str, Any]:
        """State of the loader, which must have one."""
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hand `state_dict` to the loader and begin from there."""
        self.loader.load_state_dict(state_dict)
        self.data_iter = None

    def _next_epoch(self) -> None:
        for counter in (self.loader, getattr(self.loader, "sampler", None)):
            if counter is not None and hasattr(counter, "set_epoch"):
                counter.set_epoch(getattr(counter, "epoch", 0) + 1)
                return
