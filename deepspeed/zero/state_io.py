"""Optimizer state by parameter name, out of the slices and back into them.

    slices          | exp_avg of [p3|p2 |p1..] |  | exp_avg of [..p1|p0|..] |       step: one number per slice, this rank's
    by name         exp_avg of p3, p2, p1, p0: tensors in the parameter's shape      step: one number per parameter

Tensors of a slice's size are cut at parameters; everything else ("scalars") is kept once per parameter. The names make state
independent of layout, world size and sub-group size. Callers: `engine.saving`, `engine.loading`, `engine.training` (of an
optimizer that comes with state), `zero.optimizer` (which hands it back), `zero.access`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.common.deferred import DeferredTensor, loaded
from deepspeed.errors import CheckpointError
from deepspeed.sharding import Fragment, even_range
from deepspeed.zero.flat import FlatGroup, NamedParameter
from deepspeed.zero.master import BESIDE, MasterWeights, Slice

Scalars = dict[str, dict[str, Any]]
"""Parameter name -> state key -> plain number, bool or None."""


@dataclass(frozen=True)
class StatePiece:
    """Elements `[start, start + len(values))` of state `key` of a parameter of `shape`, flattened."""

    member: NamedParameter
    shape: torch.Size
    key: str
    start: int
    values: Tensor | DeferredTensor


def state_pieces(master: MasterWeights, parts: int = 1, part: int = 0, of: FlatGroup | None = None) -> Iterator[StatePiece]:
    """Tensor state in the `part`-th of `parts` even ranges of this rank's shard space of each flat group, or of one.

    Views, or what reads them.
    """
    for s in master.slices:
        if of is not None and s.flat is not of:
            continue
        low, high = even_range(s.flat.layout.shard_numel, parts, part)
        beside = master.kept_beside(s)
        for key, value in {**master.state_of(s), **beside}.items():
            if _is_sliced(key, value, s):
                for f in s.flat.own_fragments(max(low, s.start), min(high, s.stop)):
                    begin = f.buffer_start - s.start
                    values: Tensor | DeferredTensor
                    if key in beside:
                        values = value.reshape(-1)[begin : begin + f.numel]
                    else:
                        values = master.residence.read_state(s, key, begin, begin + f.numel)
                    yield StatePiece(s.flat.members[f.index], s.flat.shapes[f.index], key, f.param_start, values)


def state_of(master: MasterWeights, flat: FlatGroup, position: int, key: str) -> list[tuple[Fragment, Tensor]]:
    """State `key` of this rank's parts of the parameter at `position` of `flat`: (part, its values, 1-D).

    Empty when there is no such tensor (yet). `param_start` of a part says where in the flattened parameter it lies.
    """
    return [
        (f, loaded(master.residence.read_state(s, key, f.buffer_start - s.start, f.buffer_start - s.start + f.numel)))
        for f, s in _state_parts(master, flat, position, key)
    ]


@contextmanager
def editing_state_of(
    master: MasterWeights, flat: FlatGroup, position: int, key: str
) -> Iterator[list[tuple[Fragment, Tensor]]]:
    """What `state_of` gives, to be changed inside."""
    master.before_change()
    with ExitStack() as stack:
        found = []
        for f, s in _state_parts(master, flat, position, key):
            begin = f.buffer_start - s.start
            values = stack.enter_context(master.residence.editing_state(s, key, begin, begin + f.numel))
            found.append((f, values))
        yield found


def _state_parts(master: MasterWeights, flat: FlatGroup, position: int, key: str) -> Iterator[tuple[Fragment, Slice]]:
    for part in flat.own_parts(position):
        for s in master.slices:
            low, high = max(part.buffer_start, s.start), min(part.buffer_start + part.numel, s.stop)
            value = master.state_of(s).get(key) if s.flat is flat and low < high else None
            if value is not None and _is_sliced(key, value, s):
                yield Fragment(part.index, part.param_start + low - part.buffer_start, low, high - low), s


def scalars_of_slices(master: MasterWeights) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """All state that is not tensors of the slice's size: the parameters of each slice, and the values that they share."""
    for s in master.slices:
        state = {**master.state_of(s), **master.kept_beside(s)}
        plain = {key: _plain(value) for key, value in state.items() if not _is_sliced(key, value, s)}
        yield [member.name for member, *_ in s.pieces()], plain


def state_scalars(master: MasterWeights) -> Scalars:
    """The same by parameter name."""
    return join_scalars(scalars_of_slices(master))


def join_scalars(of_slices: Iterable[tuple[Sequence[str], Mapping[str, Any]]]) -> Scalars:
    """By parameter name, what `scalars_of_slices` gave on one rank or several."""
    scalars: Scalars = {}
    for names, plain in of_slices:
        for name in names:
            scalars.setdefault(name, {}).update(plain)
    return scalars


def load_state(
    master: MasterWeights,
    keys: Callable[[str], list[str]],
    dtype: Callable[[str, str], torch.dtype],
    read: Callable[[str, str, int, Tensor], object],
    agreed: Mapping[int, Mapping[str, Any]],
    groups: list[dict[str, Any]] | None = None,
) -> None:
    """Replace the optimizer's state, all of it; tensors that are there and fit are filled anew.

    Args:
        master: whose optimizer's state it is.
        keys: parameter name -> its tensor state keys.
        dtype: (parameter name, key) -> of what dtype it is.
        read: (parameter name, key, first element, flat tensor to fill).
        agreed: as `agree_on_scalars` gives them.
        groups: hyperparameters per group (`lr`, `betas`, ...); None keeps the present ones.
    """
    state, away, beside = {}, {}, {}
    with master.residence.renewing():
        for number, of_slice in _to_load(master, keys, dtype, read, agreed):
            s, state[number] = master.slices[number], of_slice
            beside[s] = {key: state[number].pop(key) for key in list(state[number]) if key.startswith(BESIDE)}
            away[number] = master.residence.put_away(s, state[number])
    present = master.optimizer.state_dict()["param_groups"]
    if groups is not None:
        present = [{**group, **loaded, "params": group["params"]} for group, loaded in zip(present, groups, strict=True)]
    order = {id(p): i for i, p in enumerate(p for group in master.optimizer.param_groups for p in group["params"])}
    by_order = {order[id(master.slices[number].param)]: value for number, value in state.items()}
    for number, value in state.items():  # all of it is the optimizer's own, so `load_state_dict` copies none
        master.optimizer.state[master.slices[number].param] = value
    master.optimizer.load_state_dict({"state": by_order, "param_groups": present})
    for number, stand_ins in away.items():
        master.optimizer.state[master.slices[number].param].update(stand_ins)
    master.adopt_beside(beside)


def _to_load(
    master: MasterWeights,
    keys: Callable[[str], list[str]],
    dtype: Callable[[str, str], torch.dtype],
    read: Callable[[str, str, int, Tensor], object],
    agreed: Mapping[int, Mapping[str, Any]],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(slice number, its state), one after another; see `load_state`.

    A slice of padding alone has no word in a checkpoint. It gets zeros for what others of its group have: fused kernels
    want the same of all tensors of a group.
    """
    of_groups: dict[int, tuple[Mapping[str, Any], dict[str, torch.dtype]]] = {}
    for number, counters in agreed.items():
        s = master.slices[number]
        tensors = _joined(s, master.state_of(s), keys, dtype, read)
        of_groups.setdefault(s.flat.kind.group_index, (counters, {key: tensor.dtype for key, tensor in tensors.items()}))
        yield number, {**counters, **tensors}
    for number, s in enumerate(master.slices):
        if number not in agreed and s.flat.kind.group_index in of_groups and not any(s.pieces()):
            counters, dtypes = of_groups[s.flat.kind.group_index]
            zeros = {key: torch.zeros(s.param.shape, dtype=each, device=s.param.device) for key, each in dtypes.items()}
            yield number, {**copy.deepcopy(dict(counters)), **zeros}


def whole_state_dict(master: MasterWeights) -> dict[str, Any]:
    """The optimizer's `state_dict()` with all tensors in memory, wherever they rest."""
    given = master.optimizer.state_dict()
    params = [p for group in master.optimizer.param_groups for p in group["params"]]
    slices = {id(s.param): s for s in master.slices}
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    for number, param in zip(numbers, params, strict=True):
        s = slices[id(param)]
        given["state"][number] = {
            key: loaded(master.residence.read_state(s, key, 0, s.numel)).view(s.param.shape) if _is_away(value) else value
            for key, value in given["state"].get(number, {}).items()
        }
    return given


def put_all_away(master: MasterWeights) -> None:
    """State that somebody else gave the optimizer goes to where it rests."""
    for s in master.slices:
        state = master.state_of(s)
        state.update(master.residence.put_away(s, state))


def agree_on_scalars(
    master: MasterWeights, keys: Callable[[str], list[str]], scalars: Mapping[str, Mapping[str, Any]]
) -> dict[int, dict[str, Any]]:
    """Plain state of each slice that has any state: slice number -> key -> value. Changes nothing.

    Args:
        master: whose slices.
        keys: parameter name -> its tensor state keys.
        scalars: as `state_scalars` gives them.

    Raises:
        CheckpointError: parameters that now share a slice come with different keys or step counts.
    """
    agreed: dict[int, dict[str, Any]] = {}
    for number, s in enumerate(master.slices):
        known = [member.name for member, *_ in s.pieces() if keys(member.name) or member.name in scalars]
        if known:
            agreed[number] = _agreed_scalars(known, scalars)
    return agreed


def carry_state(master: MasterWeights, client_state: Mapping[int, dict[str, Any]]) -> None:
    """Move the state that a client's optimizer came with, keyed by `id(parameter)`, to the slices."""
    if not client_state:
        return
    shapes: dict[str, torch.Size] = {}
    states: dict[str, dict[str, Any]] = {}
    for flat in master.flats:
        group = master.optimizer.param_groups[flat.kind.group_index]
        for member, shape in zip(flat.members, flat.shapes, strict=True):
            master.optimizer.state.pop(member.param, None)
            shapes[member.name] = shape
            if id(member.param) in client_state:
                states[member.name] = _whole_state(client_state[id(member.param)], shape, group)

    def is_tensor_of_param(name: str, key: str, value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape == shapes[name] and key != "step"

    def keys(name: str) -> list[str]:
        return [k for k, v in states.get(name, {}).items() if is_tensor_of_param(name, k, v)]

    scalars = {n: {k: _plain(v) for k, v in st.items() if not is_tensor_of_param(n, k, v)} for n, st in states.items()}
    load_state(
        master,
        keys=keys,
        dtype=lambda name, key: states[name][key].dtype,
        read=lambda name, key, start, out: out.copy_(states[name][key].detach().reshape(-1)[start : start + out.numel()]),
        agreed=agree_on_scalars(master, keys, scalars),
    )


def _whole_state(state: Mapping[str, Any], shape: torch.Size, group: Mapping[str, Any]) -> dict[str, Any]:
    """`state` in the whole `shape`, also where it was made from a parameter that `zero.Init` had sharded.

    Such state is empty, and new: only torch's Adagrad makes state before its first step, at a value of its group.
    """
    first = float(group.get("initial_accumulator_value", 0.0))
    return {
        key: value.new_full((), first).expand(shape)
        if isinstance(value, Tensor) and value.shape == (0,) and shape.numel()
        else value
        for key, value in state.items()
    }


def hand_back(master: MasterWeights) -> None:
    """Inverse of `carry_state`: the optimizer holds the model's parameters again, each with its own state.

    State keeps its dtype: after 16-bit training it is that of the masters. Where state is sharded over ranks the optimizer
    starts anew: bringing it together would take every rank, and this is not a collective call (a checkpoint keeps it). It
    does so too where state rests on a disk, because it need not fit into memory.
    """
    is_at_hand = master.residence.is_in_memory and all(flat.axis.size == 1 for flat in master.flats)
    whole = _whole_states(master) if is_at_hand else {}
    for s in master.slices:
        master.optimizer.state.pop(s.param, None)
    master.optimizer.state.update(whole)
    master.unshow()


def _whole_states(master: MasterWeights) -> dict[Tensor, dict[str, Any]]:
    """State of each of the model's parameters, whole; for one rank that has all of it."""
    scalars = state_scalars(master)
    pieces: dict[str, dict[str, list[StatePiece]]] = {}
    for piece in state_pieces(master):
        pieces.setdefault(piece.member.name, {}).setdefault(piece.key, []).append(piece)
    whole: dict[Tensor, dict[str, Any]] = {}
    for member, shape in ((m, shape) for flat in master.flats for m, shape in zip(flat.members, flat.shapes, strict=True)):
        tensors = {
            key: torch.cat([loaded(piece.values) for piece in sorted(found, key=lambda piece: piece.start)]).view(shape)
            for key, found in pieces.get(member.name, {}).items()
        }
        if state := {**_loadable(scalars.get(member.name, {})), **tensors}:
            whole[member.param] = state
    return whole


def _is_sliced(key: str, value: Any, s: Slice) -> bool:
    return isinstance(value, Tensor) and value.shape == s.param.shape and key != "step"


def _is_away(value: Any) -> bool:
    """Whether it stands for a tensor that rests elsewhere."""
    return isinstance(value, Tensor) and value.device.type == "meta"


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _agreed_scalars(names: list[str], scalars: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    first = dict(scalars.get(names[0], {}))
    for name in names[1:]:
        if dict(scalars.get(name, {})) != first:
            raise CheckpointError(
                f"parameters {names[0]!r} and {name!r} share optimizer state in this layout but come with different "
                f"counters: {first} and {dict(scalars.get(name, {}))}. Give them different parameter groups, or load with "
                "load_optimizer_states=False."
            )
    return _loadable(first)


def _loadable(scalars: Mapping[str, Any]) -> dict[str, Any]:
    return {key: torch.tensor(float(value)) if key == "step" else value for key, value in scalars.items()}


def _joined(
    s: Slice,
    present: Mapping[str, Any],
    keys: Callable[[str], list[str]],
    dtype: Callable[[str, str], torch.dtype],
    read: Callable[[str, str, int, Tensor], object],
) -> dict[str, Tensor]:
    pieces = list(s.pieces())
    dtypes = {key: dtype(member.name, key) for member, *_ in reversed(pieces) for key in keys(member.name)}
    joined = {key: _room(present.get(key), s, of_key) for key, of_key in dtypes.items()}
    for member, param_start, slice_start, numel in pieces:
        has = keys(member.name)
        for key, values in joined.items():
            here = values.view(-1)[slice_start : slice_start + numel]
            if key in has:
                read(member.name, key, param_start, here)
            else:
                here.zero_()
    return joined


def _room(present: Any, s: Slice, dtype: torch.dtype) -> Tensor:
    """A tensor for state of a slice: the present one where it fits, so that a load needs no second one."""
    has_memory = isinstance(present, Tensor) and present.is_contiguous() and not _is_away(present)
    if has_memory and present.shape == s.param.shape and present.dtype == dtype:
        found: Tensor = present
        return found
    return torch.zeros(s.param.shape, dtype=dtype, device=s.param.device)
