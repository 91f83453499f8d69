"""A checkpoint of a pipeline whose tied modules stand under the number of their first layer, under the tied names.

    module/0.weight, optimizer/0.weight/...  -->  module/tied_modules.embed.weight, optimizer/tied_modules.embed.weight/...

The original writes a pipeline without ZeRO so: nothing in its files says that a layer is tied, but the model to load does.

Does not live here: names in files (`original`, `reader`). `engine.loading` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from deepspeed.checkpoint.source import CheckpointSource, EngineState
from deepspeed.sharding.cut import Cut

__all__ = ["RenamedSource", "under_tied_names"]

_KINDS = ("module/", "master/", "optimizer/")


def under_tied_names(source: CheckpointSource, tied_layers: Mapping[str, int]) -> CheckpointSource:
    """`source`, with tied names where it has numbers; itself where it has the names, or nothing is tied.

    Args:
        source: an open checkpoint.
        tied_layers: key of each tie -> index of its first layer.
    """
    stored = source.names("module/") + source.names("master/")
    prefixes = {
        f"{layer}.": f"tied_modules.{key}."
        for key, layer in tied_layers.items()
        if not any(f"/tied_modules.{key}." in name for name in stored)
    }
    return RenamedSource(source, prefixes) if prefixes else source


class RenamedSource:
    """Another source with other beginnings of parameter names; see `CheckpointSource` for its methods.

    Args:
        source: what is read.
        prefixes: beginning there -> beginning here.
    """

    def __init__(self, source: CheckpointSource, prefixes: Mapping[str, str]) -> None:
        self._source = source
        self._prefixes = dict(prefixes)
        self.folder: Path = source.folder
        self.tag: str = source.tag

    def _here(self, name: str) -> str:
        for there, here in self._prefixes.items():
            if name.startswith(there):
                return here + name.removeprefix(there)
        return name

    def _there(self, tensor: str) -> str:
        kind, _, name = tensor.partition("/")
        for there, here in self._prefixes.items():
            if name.startswith(here):
                return f"{kind}/{there}{name.removeprefix(here)}"
        return tensor

    @cached_property
    def state(self) -> EngineState:
        """See `CheckpointSource`."""
        state = dict(self._source.state)
        for key in ("frozen_parameters", "buffers"):
            state[key] = [self._here(name) for name in cast("list[str]", state[key])]
        optimizer = self._source.state["optimizer"]
        if optimizer is not None:
            state["optimizer"] = {
                **optimizer,
                "members": [[self._here(name) for name in group] for group in optimizer["members"]],
                "scalars": {self._here(name): values for name, values in optimizer["scalars"].items()},
            }
        return cast("EngineState", state)

    def with_members(self, members: Sequence[Sequence[str]]) -> CheckpointSource:
        """See `CheckpointSource`."""
        back = {here: there for there, here in self._prefixes.items()}
        renamed = RenamedSource(self._source, back)
        return RenamedSource(
            self._source.with_members([[renamed._here(name) for name in group] for group in members]), self._prefixes
        )

    def client_state(self) -> dict[str, Any]:
        """See `CheckpointSource`."""
        return self._source.client_state()

    def rank_state(self, rank: int) -> dict[str, Any]:
        """See `CheckpointSource`."""
        return self._source.rank_state(rank)

    def names(self, prefix: str = "") -> list[str]:
        """See `CheckpointSource`."""
        found = self._source.names(prefix if prefix in _KINDS else "")
        renamed = ("/".join((kind, self._here(name))) for kind, _, name in (each.partition("/") for each in found))
        return sorted(name for name in renamed if name.startswith(prefix))

    def shape(self, name: str) -> tuple[int, ...]:
        """See `CheckpointSource`."""
        return self._source.shape(self._there(name))

    def dtype(self, name: str) -> torch.dtype:
        """See `CheckpointSource`."""
        return self._source.dtype(self._there(name))

    def read(self, name: str, start: int = 0, length: int | None = None, out: Tensor | None = None) -> Tensor:
        """See `CheckpointSource`."""
        return self._source.read(self._there(name), start, length, out)

    def cut(self, name: str) -> Cut | None:
        """See `CheckpointSource`."""
        return self._source.cut(self._there(name))

    def read_stored(self, name: str, start: int, out: Tensor) -> Tensor:
        """See `CheckpointSource`."""
        return self._source.read_stored(self._there(name), start, out)

    def check_own_share(self) -> None:
        """See `CheckpointSource`."""
        self._source.check_own_share()
