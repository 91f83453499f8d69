"""Reading and editing sharded parameters: whole inside a `with` block, sharded again after it.

    with GatheredParameters(params, modifier_rank=0):      fetch: every rank sees whole values
        if rank == 0:
            edit                                           store: rank 0's values become everybody's shards
                                                           drop:  back to what it was before the block

Lives here: which parameters, in which order, and what an exception means. Does not live here: the gathering; each
parameter's holder does it (`zero.shard` before there is an engine, `zero.coordinator` afterwards). Called by clients and
by `zero.tiling`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import torch
from torch import nn

from deepspeed.errors import ArgumentError
from deepspeed.zero.external import register_external_parameter
from deepspeed.zero.holder import ParameterHolder, holder_of
from deepspeed.zero.published import in_rank_order

__all__ = ["GatheredParameters", "is_one_rank_editing", "unwrap_model_for_generation"]

_one_rank_edits: ContextVar[int] = ContextVar("_one_rank_edits", default=0)


class GatheredParameters:
    """Context in which sharded parameters are whole. All ranks enter and leave it, with the same parameters in any order.

    On leaving, each parameter returns to its earlier state: one that an enclosing block gathered stays whole.

    Args:
        params: a Parameter, a Module (all of its parameters), or any iterable of them. Repeated ones, None, tensors that
            are no parameters, and parameters that are not sharded are passed over; so the block costs nothing where
            nothing is sharded.
        modifier_rank: global rank whose values everybody keeps on leaving. None: edits are dropped. An exception inside the
            block drops them as well.
        fwd_module: register the parameters as external ones of this module (`zero.external`).
        enabled: False makes it do nothing.

    Raises:
        ArgumentError: `params` holds something else, or `modifier_rank` is none of the ranks that share the parameters.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._params = in_rank_order(filter(holder_of, _parameters(params))) if enabled else []
        self._modifier_rank = modifier_rank if enabled else None
        self._exits: list[ExitStack] = []  # one for each time the block was entered
        if fwd_module is not None:
            for param in self._params:
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> GatheredParameters:
        with ExitStack() as undo:
            for holder, params in _by_holder(self._params):
                holder.fetch(params)
                undo.push(_Return(holder, params, self._modifier_rank).leave)
            self._exits.append(undo.pop_all())
        _one_rank_edits.set(_one_rank_edits.get() + (self._modifier_rank is not None))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _one_rank_edits.set(_one_rank_edits.get() - (self._modifier_rank is not None))
        self._exits.pop().__exit__(kind, error, trace)


class _Return:
    """Undoes one fetch; stores first, unless an exception is under way."""

    def __init__(self, holder: ParameterHolder, params: list[nn.Parameter], modifier_rank: int | None) -> None:
        self._holder = holder
        self._params = params
        self._modifier_rank = modifier_rank

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the block; `kind` is that of the exception under way."""
        try:
            if self._modifier_rank is not None and kind is None:
                self._holder.store(self._params, self._modifier_rank)
        finally:
            self._holder.drop(self._params)


def is_one_rank_editing() -> bool:
    """Whether this code may be running on one rank alone: inside a block with a `modifier_rank`."""
    return _one_rank_edits.get() > 0


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the module inside an engine with all parameters whole, to generate without a gather per layer and token.

    All ranks enter and leave it. Edits are dropped.
    """
    inner = getattr(model, "module", model)
    with GatheredParameters(inner.parameters()):
        yield inner


def _by_holder(params: Iterable[nn.Parameter]) -> list[tuple[ParameterHolder, list[nn.Parameter]]]:
    """Parameters of one holder together, in the order of the first of each."""
    found: dict[int, tuple[ParameterHolder, list[nn.Parameter]]] = {}
    for param in params:
        holder = holder_of(param)
        if holder is not None:
            found.setdefault(id(holder), (holder, []))[1].append(param)
    return list(found.values())


def _parameters(params: Any) -> list[nn.Parameter]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    is_many = isinstance(params, Iterable) and not isinstance(params, torch.Tensor)
    given = list(params) if is_many else [params]
    wrong = [item for item in given if item is not None and not isinstance(item, torch.Tensor)]
    if wrong:
        raise ArgumentError(
            f"GatheredParameters() was given a {type(wrong[0]).__name__}; needed a parameter, a module or an iterable of "
            "parameters. For a dict of parameters pass its values()."
        )
    return [item for item in given if isinstance(item, nn.Parameter)]
