"""A configuration without its secrets: what may be logged or stored.

Lives here: which keys are secret, and that what stands before the host of an address is (`https://name:password@host`). Does
not live here: logging and storing; the engine asks before it does either.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["without_secrets"]

_SECRET_KEYS = frozenset({"api_key"})
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def without_secrets(value: Any) -> Any:
    """A deep copy of a configuration in which the value of every secret key that is set reads "(hidden)".

    So do name, password or token in an address.
    """
    if isinstance(value, Mapping):
        return {
            key: "(hidden)" if key in _SECRET_KEYS and inner is not None else without_secrets(inner)
            for key, inner in value.items()
        }
    if isinstance(value, str):
        return _IN_ADDRESS.sub("(hidden)", value)
    return [without_secrets(inner) for inner in value] if isinstance(value, list) else value
