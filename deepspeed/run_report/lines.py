"""One line of a run log as the record that it was, whatever version wrote it.

    b'{"kind": "step", "time": 1764.5, "step": 12, "loss": 2.5, ...}'  -->  run_log.Step(time=1764.5, step=12, loss=2.5, ...)

The fields are `run_log`'s own. Writers give all of them; here, what may be None may be absent, keys without a field are
passed over, and a kind that has no record is an error of its own. Nearly all lines are read by pydantic from their bytes.
Those that it refuses are read again, slowly: the error's text says what is wrong, NaN and infinities are not known, and
characters that steer a terminal become signs. Does not live here: files and attempts (`reading`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, make_dataclass
from dataclasses import field as field_of
from types import NoneType
from typing import Any, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from deepspeed.run_log import KINDS, Record

__all__ = ["UnknownKindError", "record_of"]

_TOLERANT = ConfigDict(extra="ignore", allow_inf_nan=False)
_HEAD = re.compile(rb'\{"kind": ?"(\w+)"')  # as writers begin a line
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160), *range(0xD800, 0xE000)) if code not in (9, 10)}


class UnknownKindError(ValueError):
    """A line of a kind that this version does not know."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"kind {kind!r}, which this version does not know")
        self.kind = kind


def _tolerant(kind: type[Record]) -> TypeAdapter[Record]:
    """Reads a kind's values; those that may be None may be absent."""
    hints = get_type_hints(kind)
    absent: list[tuple[str, Any, Any]] = [
        (each.name, hints[each.name], field_of(default=None))
        for each in fields(kind)
        if each.default is MISSING and NoneType in get_args(hints[each.name])
    ]
    told: list[tuple[str, Any]] = [("time", float)]  # no record without it
    namespace = {"__pydantic_config__": _TOLERANT, "__doc__": kind.__doc__}
    made = make_dataclass(kind.__name__, [*told, *absent], bases=(kind,), namespace=namespace, frozen=True, kw_only=True)
    return TypeAdapter(made)


_ADAPTERS: Mapping[bytes, TypeAdapter[Record]] = {name.encode(): _tolerant(kind) for name, kind in KINDS.items()}


def record_of(line: bytes) -> Record:
    """Read one line, which has text in it.

    Raises:
        UnknownKindError: this version does not know its kind.
        ValueError: it is no record; the text says why.
    """
    head = _HEAD.match(line)
    if head is None or head[1] not in _ADAPTERS or not line.isascii() or b"\\" in line or b"\x7f" in line:
        return _explained(line)
    try:
        return _ADAPTERS[head[1]].validate_json(line)
    except ValidationError:
        return _explained(line)


def _explained(line: bytes) -> Record:
    """The same for any line, several times as slow."""
    try:
        values = _without_controls(json.loads(line, parse_constant=lambda _: None))
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(values, dict) or not isinstance(kind := values.get("kind"), str):
        raise ValueError('no object with a "kind"')
    adapter = _ADAPTERS.get(kind.encode(errors="replace"))
    if adapter is None:
        raise UnknownKindError(kind)
    try:
        return adapter.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{kind}, {where}: {first['msg']}") from error


def _without_controls(value: Any) -> Any:
    """The same with signs in place of characters that steer a terminal, or that no file can hold."""
    if isinstance(value, str):
        return value.translate(_CONTROLS)
    if isinstance(value, dict):
        return {key.translate(_CONTROLS): _without_controls(inner) for key, inner in value.items()}
    return [_without_controls(inner) for inner in value] if isinstance(value, list) else value
