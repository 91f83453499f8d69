"""`deepspeed-checkpoint show DIR`: what is inside one checkpoint.

Does not live here: values (`diff` compares them, `exports` writes them). Called by `main`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple

from rich.console import RenderableType

from deepspeed.checkpoint.reader import CheckpointReader
from deepspeed.checkpoint.source import CheckpointSource
from deepspeed.checkpoint.tools.facts import Facts, facts_of, files_in
from deepspeed.checkpoint.tools.output import Report, dtype_text, line, nbytes_text, plain, table
from deepspeed.checkpoint.tools.places import Place, open_place
from deepspeed.common.wording import some

__all__ = ["show_checkpoint"]

_SHOWN_STATE = ("global_steps", "global_samples", "skipped_steps", "micro_steps", "loss_scaler", "lr_scheduler", "data")
_SHOWN_WHERE_STORED = ("mesh",)
_KEYS_SHOWN = 60


class _Stored(NamedTuple):
    """One tensor."""

    name: str
    shape: list[int]
    dtype: str
    nbytes: int
    fragments: int | None
    """Pieces that it is stored in; None where the layout has no such notion."""
    files: list[str] | None
    cut: str | None
    """How ranks held it, where they held parts whose order it is stored in."""


def show_checkpoint(place: Place, pattern: str = "*") -> Report:
    """Describe one checkpoint.

    Args:
        place: which one.
        pattern: shell pattern of the tensor names to list (`master/*`); sums count all.

    Raises:
        CheckpointError, CheckpointDamagedError: it cannot be opened.
    """
    source = open_place(place)
    facts, tensors = facts_of(source, place), [_stored(source, name) for name in source.names()]
    listed = [tensor for tensor in tensors if fnmatchcase(tensor.name, pattern)]
    state = plain(source.state)
    client_state = source.client_state()
    record = {
        "folder": str(place.folder),
        **asdict(facts),
        "files": files_in(place.folder),
        "kinds": [kind._asdict() for kind in _kinds(tensors)],
        "tensors": [tensor._asdict() for tensor in listed],
        "state": state,
        "client_state": client_state,
    }
    shown: list[RenderableType] = [
        *_head(place, facts),
        *_state_lines(state),
        table("Client state", ("key", "value"), [(key, _brief(plain(value))) for key, value in client_state.items()])
        if client_state
        else line("Client state: none"),
        table("Files", ("file", "size"), [(f, nbytes_text(n)) for f, n in files_in(place.folder).items()], right=("size",)),
        table(
            "Tensors, summed up",
            ("kind", "number", "elements", "dtype", "size"),
            [(k.kind, k.number, f"{k.numel:,}", k.dtypes, nbytes_text(k.nbytes)) for k in _kinds(tensors)],
            right=("number", "elements", "size"),
        ),
        _tensor_table(listed),
    ]
    return Report(record, shown)


def _stored(source: CheckpointSource, name: str) -> _Stored:
    shape, dtype = source.shape(name), source.dtype(name)
    nbytes = prod(shape) * dtype.itemsize
    if not isinstance(source, CheckpointReader):
        return _Stored(name, list(shape), dtype_text(dtype), nbytes, None, None, None)
    entry, cut = source.manifest.tensors[name], source.cut(name)
    files = sorted({fragment.file for fragment in entry.fragments})
    parts = None if cut is None else f"{cut.ranks} along {cut.dim}"
    nbytes = entry.stored_numel * dtype.itemsize
    return _Stored(name, list(shape), dtype_text(dtype), nbytes, len(entry.fragments), files, parts)


class _Kind(NamedTuple):
    """All tensors of one kind: weights, masters, one state key of the optimizer, ..."""

    kind: str
    number: int
    numel: int
    dtypes: str
    nbytes: int


def _kinds(tensors: list[_Stored]) -> list[_Kind]:
    by_kind: dict[str, list[_Stored]] = {}
    for tensor in tensors:
        first, _, rest = tensor.name.partition("/")
        key = f"{first}/*/{rest.rpartition('/')[2]}" if first == "optimizer" else f"{first}/*"
        by_kind.setdefault(key, []).append(tensor)
    return [
        _Kind(
            kind,
            len(found),
            sum(prod(tensor.shape) for tensor in found),
            ", ".join(dtype for dtype, _ in Counter(tensor.dtype for tensor in found).most_common()),
            sum(tensor.nbytes for tensor in found),
        )
        for kind, found in by_kind.items()
    ]


def _head(place: Place, facts: Facts) -> list[RenderableType]:
    stage = "unknown" if facts.zero_stage is None else facts.zero_stage
    return [
        line(f"{place.folder}: {facts.layout}, step {facts.step}, {nbytes_text(facts.nbytes)}", "bold"),
        line(f"saved at {facts.saved_at} by {facts.ranks} rank(s) at ZeRO stage {stage}, model in {facts.precision}"),
    ]


def _state_lines(state: Mapping[str, Any]) -> list[RenderableType]:
    rows = [(key, _brief(state.get(key))) for key in _SHOWN_STATE]
    rows += [(key, _brief(state[key])) for key in _SHOWN_WHERE_STORED if state.get(key)]
    rows += [(key, _name_list(state.get(key))) for key in ("shared_parameters", "frozen_parameters", "buffers")]
    shown: list[RenderableType] = [table("State", ("key", "value"), rows)]
    optimizer = state.get("optimizer")
    if optimizer is None:
        return [*shown, line("Optimizer: none")]
    groups = [
        (number, len(members), _brief(group))
        for number, (group, members) in enumerate(zip(optimizer["groups"], _members(optimizer), strict=True))
    ]
    title = f"Optimizer {optimizer.get('name') or 'of unknown class'}"
    return [*shown, table(title, ("group", "parameters", "hyperparameters"), groups, right=("group", "parameters"))]


def _members(optimizer: Mapping[str, Any]) -> list[list[str]]:
    members: list[list[str]] = optimizer.get("members") or [[] for _ in optimizer["groups"]]
    return members


def _tensor_table(tensors: list[_Stored]) -> RenderableType:
    has_parts = any(tensor.cut for tensor in tensors)
    rows = [
        (
            tensor.name,
            "x".join(map(str, tensor.shape)) or "one value",
            tensor.dtype,
            nbytes_text(tensor.nbytes),
            tensor.fragments,
            _places(tensor.files),
            *([tensor.cut] if has_parts else []),
        )
        for tensor in tensors
    ]
    columns = ("name", "shape", "dtype", "size", "fragments", "in", *(["parts"] if has_parts else []))
    return table("Tensors", columns, rows, right=("size", "fragments"))


def _places(files: list[str] | None) -> str | None:
    """Up to two files by name, more by number."""
    if files is None:
        return None
    return f"{len(files)} files" if len(files) > 2 else ", ".join(file.removesuffix(".safetensors") for file in files)


def _brief(value: Any) -> str:
    """A value in one short piece."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_brief(item)}" for key, item in value.items()) or "{}"
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def _name_list(found: Any) -> str:
    if isinstance(found, Mapping):
        found = [f"{alias} = {owner}" for alias, owner in found.items()]
    return some(found or [], _KEYS_SHOWN)
