"""Sharded parameters of an engine that was destroyed: they stay sharded until somebody uses one of them.

    destroy()     param.data is empty, each rank keeps its shards                  no rank waits for another
    first use     of any of them (an operation, `.data`, `.shape`, a state dict)   all become whole, on all ranks together
    no use        nothing is gathered; the shards go with the parameters

Why not at once: `destroy` would be a collective, and clients call it on one rank (a search over settings by Transformers
frees the model of the first rank only); and most who call it drop the model next, which need not fit into memory whole.

How a use is noticed: the class of such a parameter has `__torch_function__`, which torch asks before any operation on it, as
it asks the parameters of lazy modules. With the first use the parameters have their own class again.

Does not live here: how they become whole (`zero.coordinator`, which calls this).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

__all__ = ["retire"]

_RETIRED = "_ds_retired"
_tensor: Any = Tensor  # its attributes are seen here as what they are: descriptors
_WITHOUT_VALUES = frozenset(
    [
        *(_tensor.__hash__, _tensor.requires_grad_),
        *(_tensor.grad.__get__, _tensor.grad.__set__, _tensor.grad_fn.__get__, _tensor.is_leaf.__get__),
        *(_tensor.requires_grad.__get__, _tensor.requires_grad.__set__),
        *(_tensor.dtype.__get__, _tensor.device.__get__, _tensor.is_floating_point, _tensor.is_complex),
    ]
)
"""What may be asked of a parameter on one rank: membership in a set or a module, gradients, training, dtype, device."""


class _Retired:
    """Retired parameters that become whole together."""

    def __init__(self, params: Iterable[nn.Parameter], make_whole: Callable[[], None]) -> None:
        self._params = list(params)
        self._make_whole = make_whole
        for param in self._params:
            vars(param)[_RETIRED] = self
            param.__class__ = _retired_class(type(param))

    def restore(self) -> None:
        params, self._params = self._params, []
        for param in params:
            param.__class__ = _own(type(param))
            del vars(param)[_RETIRED]
        if params:
            self._make_whole()


class _Noticing:
    """Mixed into the class of a retired parameter."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """One of its own class: what is made as `type(param)(values)`, such as a deep copy, is not retired."""
        return _own(cls)(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if function in _WITHOUT_VALUES:
            with DisableTorchFunctionSubclass():
                return function(*args, **named)
        for param in _found((args, named)):
            if (retired := vars(param).get(_RETIRED)) is not None:
                retired.restore()
        return function(*args, **named)


@cache
def _retired_class(own: type[nn.Parameter]) -> type[nn.Parameter]:
    return type(own.__name__, (_Noticing, own), {"__module__": own.__module__})


def _own(retired: type) -> type[nn.Parameter]:
    own: type[nn.Parameter] = retired.__mro__[2]
    return own


def _found(tree: Any) -> Iterator[nn.Parameter]:
    if isinstance(tree, _Noticing):
        yield tree  # type: ignore[misc]  # only classes of parameters are mixed with it
    elif isinstance(tree, Mapping):
        for each in tree.values():
            yield from _found(each)
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _found(each)


def retire(params: Iterable[nn.Parameter], make_whole: Callable[[], None]) -> None:
    """Call `make_whole` at the first use of one of `params`, which are empty until then.

    Args:
        params: parameters without a holder.
        make_whole: gives each its values; collective over the shard axis, as the first use is therefore.
    """
    _Retired(params, make_whole)
