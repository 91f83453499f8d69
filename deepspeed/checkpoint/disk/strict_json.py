"""JSON without the parts on which parsers differ: no NaN or Infinity, no duplicate keys, ASCII only.

Used for the manifest, the client state and the messages between ranks.

Does not live here: what is encoded (`manifest`, `client_state`, `agreement`, which call it).
"""

from __future__ import annotations

import json
from collections import Counter

from pydantic import JsonValue

__all__ = ["dumps", "loads"]


def dumps(value: JsonValue, *, indent: int | None = None) -> str:
    """Text of `value`, keys in their given order.

    Raises:
        ValueError: a float that is not finite.
    """
    return json.dumps(value, allow_nan=False, indent=indent, separators=None if indent else (",", ":"))


def loads(text: str | bytes) -> JsonValue:
    """Value of strict JSON text.

    Raises:
        ValueError: not JSON, a key given twice, NaN or Infinity, or nested deeper than the parser goes.
    """
    try:
        value: JsonValue = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def _object(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"the key {Counter(key for key, _ in pairs).most_common(1)[0][0]!r} is given twice")
    return found


def _refuse_constant(constant: str) -> JsonValue:
    raise ValueError(f"{constant} is not JSON")
