"""Whole values in the hands of the user: the memory behind `GatheredParameters`.

    fetch    param.data = a private copy of the whole value      compute may gather and release the unit meanwhile
    adopt    what the user has assigned to param.data            is the copy from then on
    store    the copy of one rank -> every rank's copy -> shards and masters
    drop     param.data = the unit's buffer, or empty            edits that were not stored are gone

Lives here: copies, their counts, and giving edits to the shards. Does not live here: which parameters (`zero.gather`),
gathering (`zero.pool`). Called by `zero.coordinator`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.zero.pool import UnitPool, outside_inference_mode
from deepspeed.zero.published import ZeroParamStatus, set_status
from deepspeed.zero.states import Piece, ShardState, Unit

__all__ = ["PrivateCopies"]


@dataclass
class _Copy:
    param: nn.Parameter
    values: Tensor
    count: int = 1


class PrivateCopies:
    """The copies that `GatheredParameters` blocks have open.

    Args:
        pool: gathers and releases.
        units: `id(param)` -> its unit.
    """

    def __init__(self, pool: UnitPool, units: Mapping[int, Unit]) -> None:
        self._pool = pool
        self._units = units
        self._copies: dict[int, _Copy] = {}
        self._places = {
            id(member.param): (piece, index)
            for unit in pool.units
            for piece in unit.pieces
            for index, member in enumerate(piece.members)
        }

    def fetch(self, params: Sequence[nn.Parameter]) -> None:
        """Give each of `params` a private copy of its whole value, or count one more use of the copy it has."""
        wanted: dict[Unit, list[nn.Parameter]] = {}
        for param in params:
            if id(param) in self._copies:
                self._copies[id(param)].count += 1
            else:
                wanted.setdefault(self._units[id(param)], []).append(param)
        for unit, missing in wanted.items():
            self._copy(unit, missing)

    def _copy(self, unit: Unit, params: list[nn.Parameter]) -> None:
        was_sharded = unit.state is ShardState.SHARDED
        self._pool.bring(unit)
        with outside_inference_mode(), torch.no_grad():
            for param in dict.fromkeys(params):
                self._copies[id(param)] = _Copy(param, param.data.clone(), sum(other is param for other in params))
        if was_sharded:
            self._pool.release(unit)
        unit.fetched.update(id(param) for param in params)
        self.point(unit)

    def adopt(self, unit: Unit) -> None:
        """Let memory that the user has assigned (`param.data = ...`) be the copy; comes before `unit` is shown or hidden."""
        for key in unit.fetched:
            copy = self._copies[key]
            self._replace(copy, copy.param.data)

    def _replace(self, copy: _Copy, values: Tensor) -> None:
        self._pool.storages.pop(copy.values.untyped_storage()._cdata, None)
        copy.values = values
        if values.numel():
            self._pool.storages[values.untyped_storage()._cdata] = None

    def point(self, unit: Unit) -> None:
        """Point fetched parameters of `unit` at their copies: something has shown or hidden the unit."""
        for key in unit.fetched:
            copy = self._copies[key]
            copy.param.data = copy.values
            set_status(copy.param, ZeroParamStatus.AVAILABLE)
            self._replace(copy, copy.values)

    def drop(self, params: Iterable[nn.Parameter]) -> None:
        """Undo one `fetch` of each."""
        touched: dict[Unit, None] = {}
        for param in params:
            copy = self._copies[id(param)]
            copy.count -= 1
            if not copy.count:
                self._pool.storages.pop(copy.values.untyped_storage()._cdata, None)
                del self._copies[id(param)]
                unit = self._units[id(param)]
                unit.fetched.discard(id(param))
                touched[unit] = None
        for unit in touched:
            self.adopt(unit)
            with outside_inference_mode():
                if unit.state is ShardState.GATHERED:
                    unit.show()
                else:
                    unit.hide()
            unit.note_versions()
            self.point(unit)

    def store(self, params: Iterable[nn.Parameter], source_rank: int) -> None:
        """Make the values that global rank `source_rank` has in `params` everybody's. Collective over the shard axis.

        Of experts that it does not hold, those of the first rank that does.

        Raises:
            UsageError: a parameter was not fetched, or has another shape now.
        """
        self._pool.settle()  # a gather on its way reads the values that are about to change
        touched: dict[Unit, None] = {}
        for param in params:
            self._store(param, source_rank)
            touched[self._units[id(param)]] = None
        for unit in touched:
            unit.age()
            self._pool.refresh(unit)

    def _store(self, param: nn.Parameter, source_rank: int) -> None:
        piece, index = self._places[id(param)]
        copy = self._copies.get(id(param))
        self._refuse_unusable(param, copy, piece, index)
        assert copy is not None  # it was refused
        with outside_inference_mode(), torch.no_grad():
            values = param.data.to(piece.flat.dtype).contiguous()
            axis = piece.flat.axis
            if axis.size > 1:
                source = axis.ranks[0] if piece.flat.kind.is_expert and source_rank not in axis.ranks else source_rank
                comm.broadcast(values, src=source, group=axis.group)
            piece.flat.write_parameter(piece.positions[index], values)
            self._replace(copy, values)
            param.data = values

    def _refuse_unusable(self, param: nn.Parameter, copy: _Copy | None, piece: Piece, index: int) -> None:
        name, shape = piece.members[index].name, piece.shapes[index]
        if copy is None or param.shape != shape:
            raise UsageError(
                f"parameter {name!r} of shape {tuple(param.shape)} cannot be stored; needed the whole value, of shape "
                f"{tuple(shape)}, in a parameter that is gathered. Edit it in place inside "
                "`with deepspeed.zero.GatheredParameters(param, modifier_rank=0):`, on all ranks."
            )

    def close(self) -> None:
        """Forget every copy; parameters keep the values they show."""
        for copy in self._copies.values():
            self._pool.storages.pop(copy.values.untyped_storage()._cdata, None)
            self._units[id(copy.param)].fetched.discard(id(copy.param))
        self._copies.clear()
