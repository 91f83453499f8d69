"""How the ranks of a plan are laid out. Pure: no torch.

Called by `comparison`, and by `states`, which makes the engine's axes of it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Ranks"]


@dataclass(frozen=True)
class Ranks:
    """How the ranks are laid out."""

    world: int
    tensor: int = 1

    @property
    def zero(self) -> int:
        """Ranks that hold the same weights: data-parallel ones, and those that share a sequence."""
        return self.world // self.tensor
