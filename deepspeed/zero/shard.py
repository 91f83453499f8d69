"""Parameters sharded one by one, before there is an engine: what `zero.Init` makes.

    rank 0's values    |a a a|a a a|a a .|      W = 3 ranks, numel = 8, shard_numel = ceil(8 / 3) = 3, one of padding
    shard of a rank    |a a a|
    param.data         empty, shape (0,)                              released
                       |a a a a a a a a| in the parameter's shape     fetched

    shard   rank 0's values are dealt out: a scatter, small parameters of a module together
    fetch   all-gathers, small parameters together, all started before the first is waited for
    store   one rank's values go to all ranks, each keeps its part
    drop    the last one forgets the gathered buffer, and with it what nobody stored

Shards rest in memory, or beyond a number of elements in a file (`offload.shard_file`): each is read for a fetch then.

Lives here: `ShardedParameters`, the `ParameterHolder` of one `zero.Init` group, and what `engine.build` needs to take such
parameters over. Does not live here: when a parameter is sharded (`zero.init_context`), sharded parameters of an engine
(`zero.flat`, `zero.coordinator`).

[Note: bytes travel] Collectives move the parameters as bytes: every dtype works on every back end.

[Note: writes that go nowhere] A released parameter is an empty tensor, so writing into it does nothing. In-place operations
count up `param._version`; a parameter of which it rose while released was written to, and that is an error, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.flat import Work
from deepspeed.common.wording import some
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.offload.agreement import together
from deepspeed.offload.shard_file import Run, ShardFile
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.holder import holder_of, set_holder
from deepspeed.zero.published import ZeroParamStatus, in_rank_order, publish, set_status, withdraw

__all__ = [
    "ParamShard",
    "ShardedParameters",
    "is_sharded",
    "refuse_lost_writes",
    "take_whole",
    "whole_shape",
    "whole_values",
]

_TOGETHER_NBYTES = 1 << 20  # of each rank's shards: above it, the copy costs more than the collective that it saves
_Item = TypeVar("_Item")


@dataclass
class ParamShard:
    """This rank's share of one parameter.

    Shapes: `S` = shard_numel = ceil(numel / world size).
    """

    name: str
    """Class of the module and name in it; the whole path is not known while a model is built."""
    shape: torch.Size
    values: Tensor
    """`shard_S`: 1-D, padded with zeros. Clients may assign its `.data`, so the object stays the same. On the meta device
    where the shard rests in a file."""
    run: Run | None = None
    """Its place in the file."""
    fetch_count: int = 0
    """Fetches that were not dropped; `param.data` is whole while there are any."""
    version: int = 0
    """`param._version` when it was released; see [Note: writes that go nowhere]."""

    def load(self) -> Tensor:
        """The values, wherever they rest. Raises FileIoError."""
        return self.values if self.run is None else self.run.load()

    def save(self, values: Tensor) -> None:
        """Replace the first elements. Raises FileIoError."""
        if self.run is None:
            self.values[: values.numel()].copy_(values)
        else:
            self.run.save(values)


class ShardedParameters:
    """Keeps the shards of parameters over one group of ranks.

    All ranks of the group call each method that communicates (shard, fetch, store), with the same parameters, in one order.
    """

    def __init__(
        self,
        axis: AxisGroup,
        device: torch.device,
        *,
        rest_device: torch.device | None = None,
        pin_memory: bool = False,
        file: ShardFile | None = None,
        max_in_memory: int = 0,
    ) -> None:
        """Hold parameters for the ranks of `axis`.

        Args:
            axis: the ranks that share each parameter.
            device: where gathered values are.
            rest_device: where shards are; None is `device`.
            pin_memory: page-lock shards on the host.
            file: for shards beyond `max_in_memory`; errors with it are raised on all ranks.
            max_in_memory: elements of this rank's shards that stay in memory where there is a file.
        """
        self.axis = axis
        self.device = device
        self._rest_device = rest_device or device
        self._pin_memory = pin_memory and self._rest_device.type == "cpu" and device.type != "cpu"
        self._file = file
        self._room_numel = max_in_memory
        self._shards: MutableMapping[nn.Parameter, ParamShard] = WeakTensorKeyDictionary()

    # -- taking and giving up parameters ------------------------------------------------------------------------------

    def shard(self, named: Mapping[str, nn.Parameter]) -> None:
        """Deal the values of the group's first rank out to all and make `param.data` empty, for each parameter."""
        with _plain_tensors(), self._agreeing():
            for batch in _batches(list(named.items()), lambda item: item[1].nbytes // self.axis.size):
                flats = [param.detach().to(self.device).reshape(-1) for _, param in batch]
                for (name, param), shard_S in zip(batch, self._deal(flats), strict=True):
                    self._adopt(param, ParamShard(name, param.shape, *self._at_rest(shard_S)))

    def copy_sharded(self, param: nn.Parameter) -> nn.Parameter:
        """Return a new parameter with the same values, sharded likewise; nothing is communicated."""
        shard = self._shards[param]
        with _plain_tensors():
            copied = nn.Parameter(param.detach().clone(), param.requires_grad)
            self._adopt(copied, ParamShard(shard.name, shard.shape, *self._at_rest(shard.load().clone())))
        return copied

    def forget(self, param: nn.Parameter) -> None:
        """Stop keeping `param`: it is an ordinary parameter from then on, of whatever `param.data` is."""
        self._shards.pop(param, None)
        withdraw(param)
        set_holder(param, None)

    def _adopt(self, param: nn.Parameter, shard: ParamShard) -> None:
        self._shards[param] = shard
        set_holder(param, self)
        publish(param, shard.shape, shard.values, group=self.axis.group, is_remote=shard.run is not None)
        self._release(param, shard)

    def _deal(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """This rank's shards of 1-D tensors of which the first rank's count, in one collective."""
        world_size = self.axis.size
        if world_size == 1:
            return [flat.clone() for flat in flats]
        mine = [flat.new_zeros(-(-flat.numel() // world_size)) for flat in flats]
        nbytes = [shard_S.nbytes for shard_S in mine]
        received = torch.empty(sum(nbytes), dtype=torch.uint8, device=self.device)
        if received.numel() == 0:
            return mine
        parts = None
        if self.axis.rank == 0:
            parts = [_joined([_part(flat, world_size, rank) for flat in flats]) for rank in range(world_size)]
        comm.scatter(received, parts, src=self.axis.ranks[0], group=self.axis.group)
        for shard_S, piece in zip(mine, torch.split(received, nbytes), strict=True):
            _as_bytes(shard_S).copy_(piece)
        return mine

    def _at_rest(self, shard_S: Tensor) -> tuple[Tensor, Run | None]:
        """What `ParamShard` keeps of a shard: its values, or a stand-in and where they are."""
        if self._file is not None and shard_S.numel() > self._room_numel:
            return torch.empty_like(shard_S, device="meta"), self._file.keep(shard_S)
        self._room_numel -= shard_S.numel()
        resting = shard_S.to(self._rest_device)
        return (get_accelerator().pin_memory(resting) if self._pin_memory else resting), None

    def _agreeing(self) -> AbstractContextManager[None]:
        """Errors with the file that one rank meets inside are raised on all. Collective where there is a file."""
        return nullcontext() if self._file is None else together(self.axis, self.device)

    # -- the protocol of a holder -------------------------------------------------------------------------------------

    def fetch(self, params: Sequence[nn.Parameter]) -> None:
        """Make `param.data` whole for each; see `zero.holder.ParameterHolder`.

        Raises:
            UsageError: a parameter was given other storage while it was released.
        """
        with _plain_tensors():
            held = self._held(params)
            released = [(param, shard) for param, shard in held if shard.fetch_count == 0]
            for param, shard in released:
                _refuse_other_storage(param, shard)
            with self._agreeing():
                for param, shard in held:
                    self._follow(param, shard)
                batches = list(_batches(released, lambda pair: pair[1].values.nbytes))
                loaded = [[shard.load() for _, shard in batch] for batch in batches]
            gathers = [_Gather(self.axis, shards, self.device) for shards in loaded]
            for batch, gather in zip(batches, gathers, strict=True):
                for (param, shard), whole_F in zip(batch, gather.wait(), strict=True):
                    param.data = whole_F[: shard.shape.numel()].view(shard.shape)
                    set_status(param, ZeroParamStatus.AVAILABLE)
            for _, shard in held:  # last: after a gather that failed nothing counts as fetched
                shard.fetch_count += 1

    def drop(self, params: Sequence[nn.Parameter]) -> None:
        """Undo one `fetch` of each. Parameters that an engine has taken over meanwhile are passed over."""
        with _plain_tensors():
            for param, shard in self._held(params):
                assert shard.fetch_count > 0  # callers drop what they fetched
                shard.fetch_count -= 1
                if shard.fetch_count == 0:
                    self._release(param, shard)

    def store(self, params: Sequence[nn.Parameter], source_rank: int) -> None:
        """Give all ranks the values of global rank `source_rank`; see `zero.holder.ParameterHolder`.

        Raises:
            ArgumentError: `source_rank` does not share the parameters.
            UsageError: there a parameter has another shape than it was built with. Raised on all ranks.
        """
        if source_rank not in self.axis.ranks:
            raise ArgumentError(
                f"modifier_rank={source_rank}, but the parameters are shared by the ranks {list(self.axis.ranks)}. "
                "Name one of these: the global rank of the process that edits. With tensor-parallel or pipeline ranks each "
                "has others: comm.get_global_rank(groups._get_data_parallel_group(), 0)."
            )
        with _plain_tensors(), self._agreeing():
            for param, shard in self._held(params):
                self._store(param, shard, source_rank)

    def follow_casts(self, params: Sequence[nn.Parameter]) -> None:
        """Give the shards of fetched parameters the dtype that `module.to()` gave the parameters, on all ranks alike."""
        with _plain_tensors(), self._agreeing():
            for param, shard in self._held(params):
                self._follow(param, shard)

    def is_fetched(self, param: nn.Parameter) -> bool:
        """Whether `param.data` is whole."""
        shard = self._shards.get(param)
        return shard is not None and shard.fetch_count > 0

    def refuse_lost_writes(self) -> None:
        """Check that no released parameter was written to; see [Note: writes that go nowhere]. Collective.

        Raises:
            UsageError: on all ranks, when it happened on any.
        """
        names = [shard.name for param, shard in self._shards.items() if _was_written(param, shard)]
        found = torch.tensor([len(names)], device=self.device)
        if self.axis.size > 1:
            comm.all_reduce(found, group=self.axis.group)
        if found.item():
            where = some(names, 5, "a parameter on another rank")
            raise UsageError(
                f"zero.Init: {where} was written to while sharded, when its tensor is empty, so the values are lost. Look "
                "it up as module.weight when you write, instead of keeping a reference to it, or write inside "
                "`with deepspeed.zero.GatheredParameters([module.weight], modifier_rank=0):`."
            )

    def _held(self, params: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, ParamShard]]:
        return [(param, self._shards[param]) for param in in_rank_order(params) if param in self._shards]

    def _release(self, param: nn.Parameter, shard: ParamShard) -> None:
        param.data = torch.empty(0, dtype=param.dtype, device=self.device)
        shard.version = _version(param)
        set_status(param, ZeroParamStatus.NOT_AVAILABLE)

    def _follow(self, param: nn.Parameter, shard: ParamShard) -> None:
        """Bring the shard to the parameter's dtype, which `module.to(dtype)` changes through the empty tensor, too."""
        if shard.values.dtype != param.dtype:
            shard.values, shard.run = self._at_rest(shard.load().to(param.dtype))
            publish(param, shard.shape, shard.values, group=self.axis.group, is_remote=shard.run is not None)
            if shard.fetch_count:
                set_status(param, ZeroParamStatus.AVAILABLE)

    def _store(self, param: nn.Parameter, shard: ParamShard, source_rank: int) -> None:
        """One broadcast: the values as bytes, and one more byte that says whether they fit."""
        dtype, numel = shard.values.dtype, shard.shape.numel()
        payload = torch.zeros(numel * dtype.itemsize + 1, dtype=torch.uint8, device=self.device)
        whole_F = payload[:-1].view(dtype)
        if self.axis.ranks[self.axis.rank] == source_rank and param.shape == shard.shape:
            whole_F.copy_(param.detach().reshape(-1))
            payload[-1] = 1
        comm.broadcast(payload, src=source_rank, group=self.axis.group)
        if not payload[-1]:
            raise UsageError(
                f"{shard.name} of shape {tuple(shard.shape)} came out of GatheredParameters() with another shape on rank "
                f"{source_rank}. Edit it in place; to change its shape, assign a new torch.nn.Parameter to the module."
            )
        param.data = whole_F.view(shard.shape)
        shard_numel = shard.values.numel()
        mine = whole_F[self.axis.rank * shard_numel : (self.axis.rank + 1) * shard_numel]
        shard.save(mine)


class _Gather:
    """Several parameters on their way to being whole, in one collective."""

    def __init__(self, axis: AxisGroup, shards: Sequence[Tensor], device: torch.device) -> None:
        self._axis = axis
        self._shards = [shard_S.to(device) for shard_S in shards]
        self._work: Work | None = None
        if axis.size > 1 and any(shard_S.numel() for shard_S in shards):
            self._mine = _joined(self._shards)  # referenced until the gather is over
            self._whole = torch.empty(axis.size * self._mine.numel(), dtype=torch.uint8, device=device)
            self._work = comm.all_gather_into_tensor(self._whole, self._mine, group=axis.group, async_op=True)

    def wait(self) -> list[Tensor]:
        """The whole values of each, 1-D and padded. Those of one alone are not copied again."""
        if self._work is None:
            return [shard_S.clone() for shard_S in self._shards]
        self._work.wait()
        columns = torch.split(self._whole.view(self._axis.size, -1), [shard_S.nbytes for shard_S in self._shards], dim=1)
        return [column.reshape(-1).view(shard_S.dtype) for column, shard_S in zip(columns, self._shards, strict=True)]


# -- what an engine needs to take parameters over ---------------------------------------------------------------------


def is_sharded(param: nn.Parameter) -> bool:
    """Whether somebody keeps shards of `param` (`zero.Init` or an engine)."""
    return holder_of(param) is not None


@contextmanager
def whole_values(param: nn.Parameter) -> Iterator[Tensor]:
    """The whole values in the parameter's shape, detached; gathered for the time of the block where it is sharded.

    All ranks that share the parameter enter it. Reading only: edits of a sharded parameter are dropped.
    """
    holder = holder_of(param)
    if holder is None:
        yield param.detach()
        return
    holder.fetch([param])
    try:
        yield param.detach()
    finally:
        holder.drop([param])


def take_whole(param: nn.Parameter) -> Tensor:
    """Take a parameter over from `zero.Init`: the whole values, in its shape. It is an ordinary one from then on.

    All ranks that share the parameter call it. Its `data` is empty afterwards, for the caller to set. Values of a parameter
    that is not sharded by `zero.Init` are `param.detach()`, and nothing happens to it.
    """
    holder = holder_of(param)
    if not isinstance(holder, ShardedParameters):
        return param.detach()
    with whole_values(param) as values:
        whole = values
    holder.forget(param)
    return whole


def whole_shape(param: nn.Parameter) -> torch.Size:
    """The shape of the whole parameter, sharded or not."""
    shape: torch.Size = getattr(param, "ds_shape", param.shape)
    return shape


def refuse_lost_writes(params: Iterable[nn.Parameter]) -> None:
    """Check that nobody wrote into the empty tensor of a released parameter. All ranks call it; ordinary ones pass.

    Raises:
        UsageError: on all ranks, when it happened on any.
    """
    holders = {id(holder): holder for param in params if isinstance(holder := holder_of(param), ShardedParameters)}
    for holder in holders.values():
        holder.refuse_lost_writes()


# -- small things -----------------------------------------------------------------------------------------------------


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Make tensors that training can use, even if the caller is in `torch.inference_mode`."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def _batches(items: Sequence[_Item], nbytes_of: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Cut into runs that travel together: many small ones, or one large one."""
    batch: list[_Item] = []
    nbytes = 0
    for item in items:
        if batch and nbytes + nbytes_of(item) > _TOGETHER_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += nbytes_of(item)
    if batch:
        yield batch


def _part(flat: Tensor, world_size: int, rank: int) -> Tensor:
    """What `rank` gets of `flat`: a view, or a copy where it needs padding."""
    shard_numel = -(-flat.numel() // world_size)
    part = flat[rank * shard_numel : (rank + 1) * shard_numel]
    return torch.cat([part, part.new_zeros(shard_numel - part.numel())]) if part.numel() < shard_numel else part


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of 1-D tensors one after another; those of one alone are not copied."""
    return _as_bytes(tensors[0]) if len(tensors) == 1 else torch.cat([_as_bytes(tensor) for tensor in tensors])


def _as_bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)


def _version(param: nn.Parameter) -> int:
    return 0 if param.is_inference() else param._version


def _was_written(param: nn.Parameter, shard: ParamShard) -> bool:
    return shard.fetch_count == 0 and shard.shape.numel() > 0 and (_version(param) != shard.version or param.numel() > 0)


def _refuse_other_storage(param: nn.Parameter, shard: ParamShard) -> None:
    if param.numel():
        raise UsageError(
            f"{shard.name} was given {param.numel()} elements (param.data = ...) while sharded, when its tensor is empty. "
            "Assign inside `with deepspeed.zero.GatheredParameters([param], modifier_rank=0):`."
        )
