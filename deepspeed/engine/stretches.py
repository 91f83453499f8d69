"""Parameters that a rank holds a stretch of: its experts out of a tensor in which those of the whole layer are stacked.

    checkpoint, exports    gate_up_proj (8, 2I, M)   |  0  1  |  2  3  |  4  5  |  6  7  |
    expert-parallel rank 1 gate_up_proj (2, 2I, M)            |  2  3  |

All ranks have such a parameter under one name, the model's own. Whatever goes by name stores and reads the whole tensor at
the place of the stretch, so that files do not depend on the ranks, nor on AutoEP.

Does not live here: who makes such parameters (`moe.auto_ep`). Used by `saving`, `loading`, `whole_model`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from deepspeed.moe.auto_ep import SpreadExperts, Stretch

__all__ = ["Stretches"]


class Stretches:
    """Those of a model, by name; every other tensor is its own whole."""

    def __init__(self, module: nn.Module) -> None:
        self._found: dict[str, Stretch] = {}
        for prefix, experts in module.named_modules(remove_duplicate=False):
            if isinstance(experts, SpreadExperts) and experts.is_spread:
                self._found.update((f"{prefix}.{name}" if prefix else name, each) for name, each in experts.stretches())

    def __contains__(self, name: str) -> bool:
        """Whether other ranks hold other stretches of it."""
        return name in self._found

    def of(self, name: str, shape: Sequence[int]) -> Stretch:
        """Where a tensor lies in what a checkpoint holds under its name; `shape` is that of this rank's."""
        return self._found.get(name) or Stretch(tuple(shape), 0, shape[0] if shape else 1)

    def part(self, name: str, value: Tensor) -> Tensor:
        """This rank's part of the whole tensor of that name; a view."""
        return self._found[name].of(value) if name in self._found else value
