"""Optimizer state that the original stored without ZeRO: entries by number, to be named.

    optimizer.state_dict()     0: {exp_avg (17, 12), ...}   1: {exp_avg (20, 12), ...}   ...   by number in group order
    module                     emb.weight (17, 12)   fc1.weight (20, 12)   ...                 by name in the model's order

Nothing in the file says which number is which name. They are matched by shape, by the model's order within a group, and by
value where there is an fp32 copy. A match that is not the only one is refused, unless the caller knows the groups' names.

Does not live here: sharded state (`slices`). Called by `rank_slices` and `stages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.original.engine_state import plain_groups
from deepspeed.checkpoint.original.reading.slices import Slice, plain, stored
from deepspeed.checkpoint.original.stand_ins import LossScaler
from deepspeed.errors import CheckpointError

__all__ = ["Entry", "UnnamedEntries", "entries_of", "name_entries", "unsharded_scaler"]


@dataclass(frozen=True)
class Entry:
    """State of one parameter, by number."""

    group: int
    state: Mapping[str, Any]
    master: Tensor | None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the parameter, as far as the state tells."""
        tensors = [self.master, *self.state.values()]
        shapes = [tuple(value.shape) for value in tensors if isinstance(value, Tensor) and value.dim() > 0]
        return shapes[0] if shapes else None


@dataclass(frozen=True)
class UnnamedEntries:
    """An optimizer's state without ZeRO, before its entries have names."""

    entries: list[Entry]
    groups: list[dict[str, Any]]

    @property
    def sizes(self) -> list[int]:
        """Entries of each group."""
        return [sum(entry.group == number for entry in self.entries) for number in range(len(self.groups))]


def entries_of(optimizer: Mapping[str, Any]) -> UnnamedEntries:
    """Take an `optimizer` entry of the model states apart: a torch optimizer's, or a 16-bit wrapper's around one.

    Raises:
        CheckpointError: it is neither.
    """
    inner = optimizer.get("optimizer_state_dict", optimizer)
    if not isinstance(inner, Mapping) or "param_groups" not in inner or "state" not in inner:
        raise CheckpointError(
            f"the optimizer's state has the keys {', '.join(map(str, optimizer))}, which are not those of a torch optimizer"
        )
    if "fp32_groups_flat" in optimizer:
        raise CheckpointError(
            "the fp32 weights lie in one flat tensor without names (a fused fp16 optimizer without ZeRO); save with ZeRO "
            "stage 1 where the checkpoint comes from"
        )
    masters = [master for group in optimizer.get("fp32_groups") or () for master in group]
    entries: list[Entry] = []
    for number, group in enumerate(inner["param_groups"]):
        for index in group["params"]:
            master = masters[len(entries)].detach() if len(entries) < len(masters) else None
            entries.append(Entry(number, inner["state"].get(index, {}), master))
    return UnnamedEntries(entries, plain_groups(inner["param_groups"]))


def unsharded_scaler(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """The loss scaler of a 16-bit wrapper, as a shard would hold it; empty for a torch optimizer."""
    return {"loss_scaler": LossScaler(**optimizer)} if "cur_scale" in optimizer else {}


def name_entries(unnamed: UnnamedEntries, members: Sequence[Sequence[str]] | None, weights: Mapping[str, Tensor]) -> Slice:
    """Give the entries names.

    Args:
        unnamed: the entries.
        members: names of each group's parameters in the optimizer's order, where they are known.
        weights: trained or frozen parameters in the model's order, tied ones once.

    Raises:
        CheckpointError: the names given do not fit, or more than one naming does.
    """
    names = [name for group in members for name in group] if members is not None else _match(unnamed.entries, weights)
    entries = unnamed.entries
    fits = len(names) == len(entries) and all(
        name in weights and entry.shape in (None, tuple(weights[name].shape))
        for name, entry in zip(names, entries, strict=True)
    )
    if not fits:
        raise CheckpointError(
            f"the optimizer has {len(entries)} entries, which do not fit the parameters {', '.join(names)}"
        )
    into = Slice(groups=unnamed.groups, members=[[] for _ in unnamed.groups])
    for name, entry in zip(names, entries, strict=True):
        into.members[entry.group].append(name)
        into.scalars[name] = {}
        if entry.master is not None:
            into.masters[name] = stored(entry.master)
        for key, value in entry.state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                into.optimizer.setdefault(name, {})[key] = stored(value)
            else:
                into.scalars[name][key] = plain(value)
    return into


def _match(entries: Sequence[Entry], weights: Mapping[str, Tensor]) -> list[str]:
    if len(entries) == len(weights) and all(e.group == 0 for e in entries):
        return list(weights)
    names: dict[int, str] = {}
    for shape in dict.fromkeys(entry.shape for entry in entries):
        numbers = [number for number, entry in enumerate(entries) if entry.shape == shape]
        of_shape = [name for name, weight in weights.items() if tuple(weight.shape) == shape]
        found = _match_by_value([entries[n] for n in numbers], {name: weights[name] for name in of_shape})
        if found is None and len(of_shape) == len(numbers) and len({entries[n].group for n in numbers}) == 1:
            found = of_shape
        if found is None:
            raise CheckpointError(
                f"without ZeRO the optimizer's state has numbers instead of names, and {len(numbers)} entries of shape "
                f"{shape} could belong to any of {', '.join(of_shape) or 'no parameter'}: the model has frozen parameters, "
                "or several parameter groups"
            )
        names.update(zip(numbers, found, strict=True))
    return [names[number] for number in range(len(entries))]


def _match_by_value(entries: Sequence[Entry], weights: Mapping[str, Tensor]) -> list[str] | None:
    """Names whose weight is the rounded fp32 copy of an entry, where each entry has exactly one."""
    found = []
    for entry in entries:
        if entry.master is None:
            return None
        equal = [name for name, weight in weights.items() if torch.equal(entry.master.to(weight.dtype), weight)]
        if len(equal) != 1:
            return None
        found += equal
    return found if len(set(found)) == len(found) else None
