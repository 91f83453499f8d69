"""What clients read on a sharded parameter: its whole shape, this rank's share, and whether it is whole now.

    publish ----> param.ds_shape, ds_numel, ds_tensor, ds_status, ...      `hasattr(param, "ds_id")` says "stage 3 has it"
    set_status -> param.ds_status
    withdraw ---> an ordinary parameter again; attributes that the user set stay

Lives here: the attributes, all of them, under their published names. They repeat what the holder knows (`zero.holder`), and
nothing inside this library reads them back, but for `ds_id`: an order of parameters that is the same on all ranks.
Does not live here: shards (`zero.shard`, `zero.flat`). Called by whoever shards a parameter.

[Note: copies and pickles] A parameter's attributes are about that one object. `copy.deepcopy` of a whole parameter gives an
ordinary one, as ever; of a sharded one its holder makes another sharded one. Pickling a whole parameter drops what is set
here; pickling a sharded one would save an empty tensor, so it is refused.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from enum import Enum
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.zero.holder import ParameterHolder, holder_of

__all__ = [
    "CopyingHolder",
    "ZeroParamStatus",
    "ZeroParamType",
    "in_rank_order",
    "publish",
    "set_status",
    "withdraw",
]

_ids = itertools.count()  # every rank shards the same parameters in the same order, so an id means the same everywhere


class ZeroParamStatus(Enum):
    """`param.ds_status`: whether `param.data` is the whole parameter."""

    AVAILABLE = 1
    """Whole."""
    NOT_AVAILABLE = 2
    """Empty; each rank has its shard."""
    INFLIGHT = 3
    """A gather was started and not waited for."""


class ZeroParamType(Enum):
    """What kind of parameter ZeRO sees."""

    NORMAL = 1
    """Whole on every rank."""
    PARTITIONED = 2
    """Sharded over the data-parallel ranks."""
    REMOTE = 3
    """Sharded, and the shard rests outside the device."""


@runtime_checkable
class CopyingHolder(Protocol):
    """A holder that can make another sharded parameter with the same values, without communication."""

    def copy_sharded(self, param: nn.Parameter) -> nn.Parameter:
        """Return a new sharded parameter; `param` is one of this holder's and not whole."""


def publish(
    param: nn.Parameter,
    shape: torch.Size,
    shard: Tensor,
    *,
    group: comm.ProcessGroup | None = None,
    is_whole: bool = False,
    is_remote: bool = False,
) -> None:
    """Set the attributes of a parameter of stage 3, or refresh them; it counts as not whole, unless it always is.

    Args:
        param: the parameter; `set_holder` has said who keeps it.
        shape: of the whole parameter.
        shard: this rank's share, 1-D; the very tensor that is gathered from, so that assigning its `.data` has effect.
        group: the ranks that share it; None is the world.
        is_whole: too small to be sharded; `shard` is all of it (`zero.small`).
        is_remote: the shard rests outside memory, and `shard` is a stand-in on the meta device.
    """
    methods = _Methods(param)
    attributes: dict[str, Any] = {
        "ds_id": getattr(param, "ds_id", None),
        "ds_shape": shape,
        "ds_numel": shape.numel(),
        "ds_tensor": shard,
        "ds_status": ZeroParamStatus.AVAILABLE if is_whole else ZeroParamStatus.NOT_AVAILABLE,
        "ds_persist": is_whole,
        "ds_process_group": group,
        "ds_param_type": ZeroParamType.REMOTE if is_remote else ZeroParamType.PARTITIONED,
        "ds_active_sub_modules": set(),
        "partition_numel": methods.partition_numel,
        "all_gather": methods.all_gather,
        "all_gather_coalesced": methods.all_gather_coalesced,
        "partition": methods.partition,
        "__deepcopy__": methods.deepcopy,
        "__reduce_ex__": methods.reduce,
    }
    if attributes["ds_id"] is None:
        attributes["ds_id"] = next(_ids)
    vars(param).update(attributes)


def set_status(param: nn.Parameter, status: ZeroParamStatus) -> None:
    """Say whether `param.data` is whole now."""
    vars(param)["ds_status"] = status  # the way past nn.Module-like checks: this runs for each parameter at each gather


def withdraw(param: nn.Parameter) -> None:
    """Take the attributes away: the parameter is an ordinary one, or is about to be published anew."""
    for name in _NAMES:
        vars(param).pop(name, None)


def in_rank_order(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Each of several sharded parameters once, in an order that is the same on every rank.

    Callers may come with a set, whose order is that of addresses.
    """
    unique = {id(param): param for param in params}
    return sorted(unique.values(), key=lambda param: cast("int", getattr(param, "ds_id", -1)))


class _Methods:
    """The methods that a sharded parameter gets. Knows it weakly: an attribute of a tensor must not keep it alive."""

    def __init__(self, param: nn.Parameter) -> None:
        self._ref = weakref.ref(param)
        self._fetches = 0  # by `all_gather`, so that `partition` undoes these and nobody else's

    @property
    def _param(self) -> Any:
        param = self._ref()
        assert param is not None  # called as an attribute of the parameter
        return param

    def partition_numel(self) -> int:
        """Elements of this rank's share, padding included."""
        return int(self._param.ds_tensor.numel())

    def all_gather(
        self, param_list: Iterable[nn.Parameter] | None = None, async_op: bool = False, hierarchy: int = 0
    ) -> None:
        """Make parameters whole until their `partition`. All ranks call it; it returns when they are, `async_op` or not.

        Args:
            param_list: which; this one alone if left out.
            async_op: taken for compatibility.
            hierarchy: taken for compatibility.
        """
        for param, methods in self._with_methods(param_list):
            if methods._fetches == 0:
                _holder(param).fetch([param])
                methods._fetches = 1

    def all_gather_coalesced(self, params: Iterable[nn.Parameter], **options: object) -> _Gathered:
        """Do as `all_gather`; the result's `wait()` returns at once. `options` are taken for compatibility."""
        self.all_gather(params)
        return _Gathered()

    def partition(
        self, param_list: Iterable[nn.Parameter] | None = None, hierarchy: int = 0, has_been_updated: bool = False
    ) -> None:
        """Undo `all_gather`. All ranks call it.

        Args:
            param_list: which; this one alone if left out.
            hierarchy: taken for compatibility.
            has_been_updated: keep the values of the group's first rank; otherwise edits are dropped.
        """
        for param, methods in self._with_methods(param_list):
            if methods._fetches:
                methods._fetches = 0
                if has_been_updated:
                    _holder(param).store([param], comm.get_global_rank(param.ds_process_group, 0))
                _holder(param).drop([param])

    def _with_methods(self, param_list: Iterable[nn.Parameter] | None) -> list[tuple[Any, _Methods]]:
        params: list[Any] = in_rank_order([self._param] if param_list is None else param_list)
        return [(param, param.partition.__self__) for param in params]

    def deepcopy(self, memo: dict[int, Any]) -> nn.Parameter:
        """`copy.deepcopy` of the parameter; see [Note: copies and pickles]."""
        param = self._param
        if id(param) in memo:
            return cast("nn.Parameter", memo[id(param)])
        holder: object = holder_of(param)
        if param.ds_status is ZeroParamStatus.AVAILABLE:
            copy = nn.Parameter(param.data.clone(memory_format=torch.preserve_format), param.requires_grad)
        elif isinstance(holder, CopyingHolder):
            copy = holder.copy_sharded(param)
        else:
            raise UsageError(f"copy.deepcopy() of {_describe(param)}, which an engine shards: {_GATHER_FIRST}")
        memo[id(param)] = copy
        return copy

    def reduce(self, protocol: Any) -> Any:
        """`pickle` of the parameter; see [Note: copies and pickles]."""
        param = self._param
        if param.ds_status is not ZeroParamStatus.AVAILABLE:
            raise UsageError(f"pickling {_describe(param)}, of which this rank has a shard only: {_GATHER_FIRST}")
        plain: Any = nn.Parameter(param.data, param.requires_grad)
        vars(plain).update({name: value for name, value in vars(param).items() if name not in (*_NAMES, "_ds_holder")})
        return plain.__reduce_ex__(protocol)


class _Gathered:
    """What an asynchronous gather returns, for one that is over."""

    def wait(self) -> None:
        """Return at once."""


_NAMES = (
    "ds_id",
    "ds_shape",
    "ds_numel",
    "ds_tensor",
    "ds_status",
    "ds_persist",
    "ds_process_group",
    "ds_param_type",
    "ds_active_sub_modules",
    "partition_numel",
    "all_gather",
    "all_gather_coalesced",
    "partition",
    "__deepcopy__",
    "__reduce_ex__",
)
_GATHER_FIRST = "the whole values are needed. Do it inside `with deepspeed.zero.GatheredParameters(model.parameters()):`."


def _holder(param: nn.Parameter) -> ParameterHolder:
    holder = holder_of(param)
    assert holder is not None  # the methods exist while a holder does
    return holder


def _describe(param: Any) -> str:
    return f"a sharded parameter of shape {tuple(param.ds_shape)}"
