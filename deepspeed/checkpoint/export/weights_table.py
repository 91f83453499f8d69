"""Which weights a checkpoint has, and how they make a complete state dict: buffers, frozen, trained, then tied names.

The order is the one that consolidated files are known to have. A complete state dict is what
`module.load_state_dict(strict=True)` asks for: every persistent buffer, every parameter, every name of a tied one.

Does not live here: values (`weights_source`). Called by `files`, `full_state` and `consolidate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

from deepspeed.checkpoint.disk.names import master_tensor, module_tensor

__all__ = ["Kind", "Weight", "list_weights", "stored_weights"]


class Kind(Enum):
    """What a weight is in the model."""

    BUFFER = "buffer"
    FROZEN = "frozen"
    TRAINED = "trained"


@dataclass(frozen=True)
class Weight:
    """One entry of the state dict."""

    name: str
    stored: str
    """Name of the tensor in the checkpoint."""

    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    """Element type on the disk, in the spelling of safetensors."""

    owner: str | None = None
    """Of a tied name: the entry whose values it shares."""

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)


def stored_weights(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Name of each weight or buffer -> the stored tensor of highest precision, given all tensors' names."""
    found: dict[str, str] = {}
    for prefix in (module_tensor(""), master_tensor("")):
        found.update((stored.removeprefix(prefix), stored) for stored in tensors if stored.startswith(prefix))
    return found


def list_weights(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], state: Mapping[str, Any], *, exclude_frozen: bool = False
) -> list[Weight]:
    """The complete state dict of a checkpoint.

    Args:
        tensors: every tensor's name -> (element type, shape).
        state: what the engine stored, see `source.EngineState`.
        exclude_frozen: leave out parameters that did not require gradients, under all their names.
    """
    stored = stored_weights(tensors)
    tied: dict[str, str] = dict(state["shared_parameters"])
    buffers, frozen = set(state["buffers"]), set(state["frozen_parameters"])
    of_kind: dict[Kind, list[str]] = {kind: [] for kind in Kind}
    for name in _in_order(stored, state):
        if name not in tied:
            kind = Kind.BUFFER if name in buffers else Kind.FROZEN if name in frozen else Kind.TRAINED
            of_kind[kind].append(name)
    if exclude_frozen:
        of_kind[Kind.FROZEN].clear()
    weights = {
        name: Weight(name, stored[name], kind, tensors[stored[name]][1], tensors[stored[name]][0])
        for kind, names in of_kind.items()
        for name in names
    }
    for alias, owner in tied.items():
        if owner in weights:
            of = weights[owner]
            weights[alias] = Weight(alias, of.stored, of.kind, of.shape, of.dtype, owner)
    return list(weights.values())


def _in_order(stored: Mapping[str, str], state: Mapping[str, Any]) -> Iterator[str]:
    """Every name once: buffers and parameters as the engine listed them, then what it did not list."""
    optimizer = state["optimizer"]
    groups = optimizer["members"] if optimizer is not None else []
    listed = [*state["buffers"], *state["frozen_parameters"], *(name for group in groups for name in group)]
    yield from (name for name in dict.fromkeys([*listed, *sorted(stored)]) if name in stored)
