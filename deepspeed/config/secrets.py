"""A configuration without its secrets: what may be logged or stored.

Lives here: which keys are secret, and that what stands before the host of an address is (`https://name:password@host`). Does
not live here: logging and storing; the engine asks before it does either.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["is_secret", "without_secrets"]

_ENDS_OF_SECRET = ("apikey", "token", "secret", "password")
"""Ends of keys, "_" and "-" left out, capital letters or not: misspelt and foreign ones are among them."""
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def is_secret(key: object) -> bool:
    """Whether what stands under this key may be seen by nobody: `api_key`, `apiKey`, `hub_token`."""
    return str(key).lower().replace("_", "").replace("-", "").endswith(_ENDS_OF_SECRET)


def without_secrets(value: Any) -> Any:
    """A deep copy of a configuration in which the value of every secret key that is set reads "(hidden)".

    So do name, password or token in an address.
    """
    if isinstance(value, Mapping):
        return {
            key: "(hidden)" if is_secret(key) and inner is not None else without_secrets(inner)
            for key, inner in value.items()
        }
    if isinstance(value, str):
        return _IN_ADDRESS.sub("(hidden)", value)
    return [without_secrets(inner) for inner in value] if isinstance(value, list) else value
