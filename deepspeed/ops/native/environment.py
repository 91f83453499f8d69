"""The environment variable that turns the native library off.

DS_BUILD_OPS and DS_BUILD_<OP> count when the package is installed (csrc/package reads them), this one at run time. Read
nowhere else.
"""

from __future__ import annotations

import os

__all__ = ["is_native_wanted"]


def is_native_wanted() -> bool:
    """Whether the native library may be used: always, unless DS_NATIVE is 0."""
    return os.environ.get("DS_NATIVE", "").strip() != "0"
