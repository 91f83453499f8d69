"""Who keeps a sharded parameter: `zero.Init` before there is an engine, `zero.coordinator` afterwards.

    param ---holder_of---> holder     fetch    param.data is whole on this rank
                                      drop     ... until each fetch was undone
                                      store    whole values of one rank become everybody's shards

Lives here: the protocol and the back-reference from a parameter. `zero.gather` and `zero.access` ask; they need not know
which holder it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

__all__ = ["ParameterHolder", "holder_of", "set_holder"]

_HOLDER = "_ds_holder"


class ParameterHolder(Protocol):
    """Keeps shards of parameters and brings them together. All ranks of the shard axis call each method, in one order."""

    def fetch(self, params: Sequence[nn.Parameter]) -> None:
        """Make `param.data` whole for each; fetches of one parameter are counted."""

    def drop(self, params: Sequence[nn.Parameter]) -> None:
        """Undo one `fetch` of each; without any left, `param.data` is empty again and unsaved edits are gone."""

    def store(self, params: Sequence[nn.Parameter], source_rank: int) -> None:
        """Give all ranks the fetched values of global rank `source_rank`, and keep them as shards (and masters)."""


def holder_of(param: nn.Parameter) -> ParameterHolder | None:
    """The holder; None for a parameter that is not sharded."""
    holder: ParameterHolder | None = getattr(param, _HOLDER, None)
    return holder


def set_holder(param: nn.Parameter, holder: ParameterHolder | None) -> None:
    """Say who keeps `param`; None when it is whole from now on."""
    if holder is not None:
        setattr(param, _HOLDER, holder)
    elif hasattr(param, _HOLDER):
        delattr(param, _HOLDER)
