"""What a rank's copy of the model holds otherwise than the first rank that holds the same: buffers, extra state.

    rank 0   running_mean  [.1 .2]  -- module/running_mean, which every reader knows --.
    rank 1   running_mean  [.3 .1]  -- rank_state of rank 1 ---------------------------+--> as many ranks: each its own
    rank 2   running_mean  [.1 .2]  -- equal to rank 0's: not stored again             '--> more or fewer: rank 0's on all

Parameters are the same on all ranks after each step; buffers are what forward made of a rank's own batches (BatchNorm).
Experts that are spread over ranks are compared among the ranks that hold them.

Lives here: which values are a rank's own. Does not live here: storing them (`saving`), putting them back (`loading`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict, cast

import xxhash
from pydantic import JsonValue
from torch import Tensor, nn

from deepspeed.checkpoint.agreement import Ranks, ranks_of, together
from deepspeed.checkpoint.disk import strict_json
from deepspeed.checkpoint.disk.client_state import encode_client_state
from deepspeed.checkpoint.disk.container import bytes_of, dtype_name
from deepspeed.engine.axes import ModelAxes
from deepspeed.engine.cuts import Cuts
from deepspeed.engine.experts import is_name_of_experts
from deepspeed.engine.weights import extra_state, persistent_buffers
from deepspeed.errors import CheckpointError
from deepspeed.topology.mesh import AxisGroup

__all__ = ["OwnState", "fitting_own_state", "own_part_of_state", "own_state"]


class OwnState(TypedDict, total=False):
    """Keys of a rank's state in a checkpoint; absent where nothing differs."""

    buffers: dict[str, Tensor]
    """Name -> the buffer itself, not a copy."""

    extra_state: dict[str, Any]
    """Module name -> value."""

    ep_size: int
    """Ranks that experts were spread over; absent where they were not."""


def own_state(module: nn.Module, axes: ModelAxes, cuts: Cuts) -> Callable[[], OwnState]:
    """Find what of `module` is to be stored for this rank alone. Collective over the ranks of a stage.

    Args:
        module: the model, or a stage of it.
        axes: its ranks.
        cuts: what it holds parts of, which no other rank holds.

    Returns:
        As `own_part_of_state`.
    """
    of_experts = is_name_of_experts(module)
    tensor = _ranks(axes.tensor)
    dense = own_part_of_state(
        module, (_ranks(axes.dense.data), tensor), lambda name: not of_experts(name) and name not in cuts
    )
    if axes.experts.data is axes.dense.data:
        return dense
    experts = own_part_of_state(module, (_ranks(axes.experts.data), tensor), of_experts)

    def both() -> OwnState:
        parts = (dense(), experts())
        own = OwnState(ep_size=axes.dense.data.size // axes.experts.data.size)
        if buffers := {name: buffer for part in parts for name, buffer in part.get("buffers", {}).items()}:
            own["buffers"] = buffers
        if extra := {name: value for part in parts for name, value in part.get("extra_state", {}).items()}:
            own["extra_state"] = extra
        return own

    return both


def fitting_own_state(stored: OwnState, of_experts: Callable[[str], bool], ep_size: int) -> OwnState:
    """What a rank takes of what it once stored for itself: of experts nothing, where it held others then."""
    if stored.get("ep_size", 1) == ep_size:
        return stored
    return OwnState(
        buffers={name: buffer for name, buffer in stored.get("buffers", {}).items() if not of_experts(name)},
        extra_state={name: value for name, value in stored.get("extra_state", {}).items() if not of_experts(name)},
    )


def _ranks(axis: AxisGroup) -> Ranks:
    return ranks_of(axis.rank, axis.size, axis.group if axis.size > 1 else None)


def own_part_of_state(module: nn.Module, axes: Sequence[Ranks], wanted: Callable[[str], bool]) -> Callable[[], OwnState]:
    """Find what of the `wanted` names is to be stored for this rank alone; nothing on the first rank.

    Collective over the ranks of `axes`, one axis after the other; the first rank is that of all axes. Nothing is sent where
    there is neither a persistent buffer nor extra state: the ranks hold modules of one structure.

    Returns:
        What gives the result. It raises CheckpointError where a buffer has another shape or dtype than on the first rank,
        so call it where all ranks learn of an error.
    """
    buffers = {name: buffer for name, buffer in persistent_buffers(module) if wanted(name)}
    extra = {name: value for name, value in extra_state(module).items() if wanted(name)}
    several = [ranks for ranks in axes if ranks.world_size > 1]
    if not several or not (buffers or extra):
        return OwnState
    digests: dict[str, str] = {}

    def describe() -> dict[str, dict[str, str]]:
        digests.update((f"buffer {name}", _digest_of_tensor(name, buffer)) for name, buffer in buffers.items())
        digests.update((f"extra {name}", _digest_of_plain(name, value)) for name, value in extra.items())
        return {"forms": {name: _form(buffer) for name, buffer in buffers.items()}, "digests": digests}

    first = _first_of(several, describe)

    def different() -> OwnState:
        _check_forms(buffers, first["forms"], " x ".join(str(ranks.rank) for ranks in several))
        own = OwnState()
        if kept := {name: b for name, b in buffers.items() if _differs(f"buffer {name}", digests, first["digests"])}:
            own["buffers"] = kept
        if others := {name: value for name, value in extra.items() if _differs(f"extra {name}", digests, first["digests"])}:
            own["extra_state"] = others
        return own

    return different


def _first_of(axes: Sequence[Ranks], describe: Callable[[], dict[str, dict[str, str]]]) -> dict[str, dict[str, str]]:
    """What `describe` gives on the rank that is the first of every axis; it is called on all of them."""
    told = describe
    for ranks in axes:
        reported = together(ranks, partial(_of_first, told, ranks.rank), lambda reports: reports[0])
        told = partial(cast, "dict[str, dict[str, str]]", reported)
    return told()


def _of_first(told: Callable[[], dict[str, dict[str, str]]], rank: int) -> JsonValue:
    """What a rank reports of what it was told: only the first one's is needed."""
    found = cast("JsonValue", told())
    return found if rank == 0 else None


def _differs(key: str, own: Mapping[str, str], first: Mapping[str, str]) -> bool:
    return own[key] != first.get(key)


def _check_forms(buffers: Mapping[str, Tensor], first: Mapping[str, str], rank: str) -> None:
    forms = {name: _form(buffer) for name, buffer in buffers.items()}
    for name in sorted(forms.keys() | first.keys()):
        own, needed = forms.get(name, "absent"), first.get(name, "absent")
        if own != needed:
            raise CheckpointError(
                f"buffer {name!r} is {own} on data-parallel rank {rank} and {needed} on rank 0; a checkpoint needs the same "
                "buffers on all ranks, of one shape and dtype. Make them so, let cuts() of its module say how it was cut "
                "over tensor-parallel ranks, or register it with persistent=False."
            )


def _form(buffer: Tensor) -> str:
    return f"{buffer.dtype} of shape {tuple(buffer.shape)}"


def _digest_of_tensor(name: str, tensor: Tensor) -> str:
    dtype_name(tensor.dtype, f"buffer {name!r}")  # refuses what has no plain bytes
    digest: str = xxhash.xxh3_128_hexdigest(bytes_of(tensor))
    return digest


def _digest_of_plain(name: str, value: object) -> str:
    place = f"state['extra_state'][{name!r}]"
    plain, tensors = encode_client_state(value, place)
    parts = [strict_json.dumps(plain), *(_digest_of_tensor(place, tensor) for tensor in tensors)]
    return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())
