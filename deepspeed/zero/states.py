"""One unit's way between sharded and whole.

    values (this rank's shards)       buffer (fresh memory)             parameters
    | a0 | b0 | ...                                                     a, b: empty
       |  gather()  one collective per kind
       `-----------> | a0 a1 .. aW | b0 b1 .. bW |
                        wait()  show ------------------------------->   a, b: views of the buffer
                        release() hide, forget the buffer  ---------->  a, b: empty

Buffers are never reused: a view that somebody still holds (an output, what autograd saved) keeps its values.

[Note: views of shards] A rank alone has whole buckets at rest, and where its device computes on them as they lie a gather
brings nothing: the buffer of a piece is then a view of the shards. Before those change (`ParameterCoordinator.before_edit`)
idle units are released as ever, and a unit in use is moved to memory of its own (`separate`): a running module goes on with
the values that it began with. A view that autograd got and `zero.saved` did not see (another's hooks were in force) would
follow the shards; so the parameters count as written to (`age`), and autograd refuses it, as it does in a model that is not
sharded. An output that is a view of a parameter follows it there, too; and what a module writes to its own parameter is
refused as ever, but has reached the shards.

Lives here: the life cycle of a unit, the pieces it is made of, and the ways to launch a gather. Does not live here: when
to gather (`zero.pool`), who uses a unit (`zero.coordinator`). Called by these two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.comm.algorithms import Work
from deepspeed.errors import UsageError
from deepspeed.offload.parameters import TieredShards
from deepspeed.sharding import FlatLayout
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.flat import Kind, NamedParameter
from deepspeed.zero.published import ZeroParamStatus, set_status

__all__ = [
    "Launch",
    "Piece",
    "ShardState",
    "ShardedFlat",
    "Unit",
    "UnitStateError",
    "gather_by_all_reduce",
    "gather_by_gatherer",
    "one_at_a_time",
    "pieces_by_unit",
]


class UnitStateError(UsageError):
    """A step of a unit's life cycle came out of order: a fault of this library."""


class ShardState(Enum):
    """
             gather()              wait()             keep()
    SHARDED ----------> GATHERING ---------> GATHERED --------> KEPT
       ^                                        |
       +----------------- release() ------------+
    """

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"
    KEPT = "kept"
    """Parameters have memory of their own for good; nothing follows."""


_NEXT = {
    (ShardState.SHARDED, "gather"): ShardState.GATHERING,
    (ShardState.GATHERING, "wait"): ShardState.GATHERED,
    (ShardState.GATHERED, "release"): ShardState.SHARDED,
    (ShardState.GATHERED, "keep"): ShardState.KEPT,
}


class ShardedFlat(Protocol):
    """What is needed of a `zero.flat.FlatGroup` whose parameters are sharded."""

    members: tuple[NamedParameter, ...]
    shapes: tuple[torch.Size, ...]
    layout: FlatLayout
    axis: AxisGroup
    """The ranks that share the parameters."""

    tier: TieredShards | None
    """Where the shards of some buckets rest outside memory; None: nothing does."""

    retains_values: bool
    """The shards stay when the group is released, until `close_values`."""

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters are sharded at all."""

    @property
    def kind(self) -> Kind:
        """What they have in common."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""

    @property
    def values_version(self) -> int:
        """Grows whenever this rank's shards are written to."""

    def close_values(self) -> None:
        """Let go of the shards."""

    def new_whole(self, numel: int) -> Tensor:
        """Memory for `numel` gathered elements."""

    def read_values(self, start: int, stop: int) -> Tensor:
        """Elements of this rank's shard space, within one bucket."""

    def view_bucket(self, number: int) -> Tensor | None:
        """Bucket `number`, where this rank's shards are all of it as they lie: [Note: views of shards]. None: gather it."""

    def gather_bucket(self, number: int, into_F: Tensor) -> Work:
        """Start to bring bucket `number` together in `into_F`."""

    def show(self, number: int, whole_F: Tensor) -> None:
        """Let the parameters of bucket `number` be views of `whole_F`."""

    def hide(self, number: int) -> None:
        """Empty the parameters of bucket `number`."""

    def write_parameter(self, position: int, whole: Tensor) -> None:
        """Replace the parameter at `layout.slots[position]` on all ranks."""


@dataclass(frozen=True, eq=False)
class Piece:
    """One bucket of one flat group: what a unit has of one kind of parameters."""

    flat: ShardedFlat
    number: int
    """Of the bucket in `flat.layout.buckets`."""

    numel: int
    """Elements of the whole bucket, padding included."""

    members: tuple[NamedParameter, ...]
    shapes: tuple[torch.Size, ...]
    positions: tuple[int, ...]
    """Of the members in `flat.layout.slots`."""

    @property
    def is_trained(self) -> bool:
        """Whether gradients of this piece are waited for."""
        return any(member.param.requires_grad for member in self.members)

    @property
    def is_away(self) -> bool:
        """Whether its shards rest outside memory, so that a gather needs a buffer of the tier first."""
        return self.flat.tier is not None and self.number in self.flat.tier.buckets


def pieces_by_unit(flats: Sequence[ShardedFlat]) -> dict[int, list[Piece]]:
    """The pieces of each unit, by number of the unit; flat groups that are not sharded give none."""
    pieces: dict[int, list[Piece]] = {}
    for flat in flats:
        for number, bucket in enumerate(flat.layout.buckets if flat.is_sharded else ()):
            slots = flat.layout.slots[bucket.first_slot : bucket.last_slot]
            piece = Piece(
                flat,
                number,
                bucket.stop - bucket.start,
                tuple(flat.members[slot.index] for slot in slots),
                tuple(flat.shapes[slot.index] for slot in slots),
                tuple(range(bucket.first_slot, bucket.last_slot)),
            )
            pieces.setdefault(piece.members[0].unit, []).append(piece)
    return pieces


# -- ways to gather ---------------------------------------------------------------------------------------------------

Launch = Callable[[Piece, Tensor], Work]
"""Starts to bring a piece together in a buffer of its size. All ranks launch the same pieces in the same order."""


class _Done:
    def wait(self) -> None:
        """Nothing is under way."""


def gather_by_gatherer(piece: Piece, into_F: Tensor) -> Work:
    """Gather the way the flat group was built with."""
    return piece.flat.gather_bucket(piece.number, into_F)


def gather_by_all_reduce(piece: Piece, into_F: Tensor) -> Work:
    """Gather by an all-reduce over buffers that are zero but for the rank's own shard (`use_all_reduce_for_fetch_params`).

    Bytes are summed, not numbers: negative zero and NaN arrive as they are.
    """
    axis, bucket = piece.flat.axis, piece.flat.layout.buckets[piece.number]
    start, stop = piece.flat.layout.shard_range(bucket)
    into_F.zero_()
    own_S = into_F.view(axis.size, stop - start)[axis.rank]
    own_S.copy_(piece.flat.read_values(start, stop))
    if axis.size > 1:
        comm.all_reduce(into_F.view(torch.uint8), group=axis.group)
    return _Done()


def one_at_a_time(launch: Launch) -> Launch:
    """Wait for each gather before the next one starts (`allgather_sequential`)."""

    def launch_and_wait(piece: Piece, into_F: Tensor) -> Work:
        launch(piece, into_F).wait()
        return _Done()

    return launch_and_wait


# -- the unit ---------------------------------------------------------------------------------------------------------


class Unit:
    """Parameters that are gathered together: one bucket per kind, and whether they are whole now.

    Compared by identity. Only its own methods change `state`.

    Args:
        number: of the unit; the same on all ranks.
        name: of its module.
        modules: from the start of the first to the end of the last the unit is in use.
        pieces: the buckets; none for a guest, which only borrows.
        launch: starts the gather of one piece.
        is_whole: nothing below the module is a unit of its own.
    """

    __slots__ = (
        "_versions",
        "_works",
        "away_pieces",
        "buffers",
        "epoch",
        "externals",
        "fetched",
        "gathered_versions",
        "is_outdated",
        "is_whole",
        "label",
        "launch",
        "modules",
        "name",
        "names",
        "number",
        "numel",
        "params",
        "pieces",
        "reported",
        "state",
        "trained_pieces",
        "users",
        "views_shards",
    )

    def __init__(
        self,
        number: int,
        name: str,
        modules: Sequence[nn.Module],
        pieces: Sequence[Piece],
        launch: Launch,
        *,
        is_whole: bool,
    ) -> None:
        self.number = number
        self.name = name
        self.label = f"module {name!r}, gather" if name else "the model itself, gather"
        """What errors about its collectives say."""
        self.modules = tuple(modules)
        self.pieces = tuple(pieces)
        self.launch = launch
        self.is_whole = is_whole
        self.numel = sum(piece.numel for piece in pieces)
        """Elements of its buffers, padding included: what `max_live_parameters` counts."""
        self.params = tuple(member.param for piece in pieces for member in piece.members)
        self.names = tuple(member.name for piece in pieces for member in piece.members)
        self.trained_pieces = sum(piece.is_trained for piece in pieces)
        self.away_pieces = sum(piece.is_away for piece in pieces)
        """Buffers of the tier that a gather takes."""
        self.state = ShardState.SHARDED
        self.buffers: tuple[Tensor, ...] = ()
        self.gathered_versions: list[int] = []
        self._works: list[Work] = []
        self._versions = [param._version for param in self.params]
        self.users = 0
        """Running modules that need it: while there are any, its parameters stay."""
        self.externals: dict[Unit, None] = {}
        """Other units that its module uses too, in the order in which that was noticed."""
        self.fetched: set[int] = set()
        """Ids of parameters that a `GatheredParameters` block has in hand."""
        self.reported = 0
        """Trained pieces whose gradients have arrived in this backward."""
        self.is_outdated = False
        """To be released as soon as nobody uses it; the same on all ranks."""
        self.epoch = 0
        """Counts changes of its values: what autograd saved before one is of no use after it."""
        self.views_shards = False
        """Whether it has shown views of the shards since they last changed; see the note on top."""

    def gather(self) -> None:
        """Start to bring the unit together. Collective over the shard axis, unless the gatherer says otherwise."""
        after = self._after("gather")
        versions = [piece.flat.values_version for piece in self.pieces]
        buffers, works = [], []
        for piece in self.pieces:
            view = piece.flat.view_bucket(piece.number)
            buffers.append(piece.flat.new_whole(piece.numel) if view is None else view)
            if view is None:
                works.append(self.launch(piece, buffers[-1]))
        self.views_shards = self.views_shards or len(works) < len(buffers)
        self.buffers, self.gathered_versions, self._works = tuple(buffers), versions, works
        self.is_outdated = False
        self.state = after
        for param in self.params:
            set_status(param, ZeroParamStatus.INFLIGHT)

    def wait(self) -> None:
        """Block the caller (on a device: its current stream) until every parameter is whole.

        Raises:
            UsageError: a parameter was written to while it was empty.
        """
        after = self._after("wait")
        self._refuse_edits("while it was empty: only shards are kept outside its module's forward")
        for work in self._works:
            work.wait()
        self.show()
        self._works = []
        self.state = after

    def show(self) -> None:
        """Point the parameters at the buffers."""
        for piece, buffer in zip(self.pieces, self.buffers, strict=True):
            piece.flat.show(piece.number, buffer)
        for param in self.params:
            set_status(param, ZeroParamStatus.AVAILABLE)

    def release(self) -> None:
        """Empty the parameters and forget the buffers.

        Raises:
            UsageError: a parameter was written to while it was whole.
        """
        after = self._after("release")
        self.hide()
        self.buffers = ()
        self.state = after
        self._refuse_edits("inside a forward; what was written there goes with the gathered copy")

    def hide(self) -> None:
        """Empty the parameters."""
        for piece in self.pieces:
            piece.flat.hide(piece.number)
        for param in self.params:
            set_status(param, ZeroParamStatus.NOT_AVAILABLE)

    def separate(self) -> None:
        """Show copies instead of views of shards: those are about to change, and the unit is in use."""
        if self.state is ShardState.GATHERED and self.views_shards:
            self.buffers = tuple(buffer.clone() for buffer in self.buffers)
            self.show()

    def keep(self) -> None:
        """Give every parameter memory of its own, and forget the buffers: the unit is not sharded any more."""
        after = self._after("keep")
        for param in self.params:
            param.data = param.data.clone()
        self.buffers = ()
        self.state = after

    def is_stale(self) -> bool:
        """Whether this rank's shards were written to since the unit was gathered.

        A net for writes that nobody announced (`ParameterCoordinator.before_edit`): another rank may see it otherwise.
        """
        for piece, version in zip(self.pieces, self.gathered_versions, strict=True):
            if piece.flat.values_version != version:
                return True
        return False

    # -- edits --------------------------------------------------------------------------------------------------------

    def age(self) -> None:
        """The values change: what autograd saved before is refused after it. Comes after `release` or `separate`."""
        self.epoch += 1
        if self.views_shards:
            torch.autograd.graph.increment_version(self.params)
            self._versions = [version + 1 for version in self._versions]  # what the user wrote is still to be found
            self.views_shards = False

    def note_versions(self) -> None:
        """What was written to the parameters up to now is accounted for."""
        self._versions = [param._version for param in self.params]

    def _refuse_edits(self, when: str) -> None:
        versions = [param._version for param in self.params]
        if versions == self._versions:
            return
        edited = [
            name
            for name, param, old, new in zip(self.names, self.params, self._versions, versions, strict=True)
            if old != new and id(param) not in self.fetched
        ]
        self._versions = versions
        if edited:
            raise UsageError(
                f"the sharded parameter {edited[0]!r} was written to {when}, and the values would be lost. Write to it "
                "inside `with deepspeed.zero.GatheredParameters(param, modifier_rank=0):`, outside the forward."
            )

    def _after(self, step: str) -> ShardState:
        if (self.state, step) not in _NEXT:
            allowed = [name for state, name in _NEXT if state is self.state]
            raise UnitStateError(
                f"unit {self.name!r}: {step}() while {self.state.value}; allowed now: {allowed}. This is a fault of the "
                "library; please report it with the model's structure."
            )
        return _NEXT[self.state, step]

    def __repr__(self) -> str:
        return f"Unit({self.number}, {self.name!r}, {self.state.value}, users={self.users})"
