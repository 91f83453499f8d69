"""transformers, an optional dependency, imported where it is first needed.

Lives here: the import and its error. Called by the other modules of this room.
"""

from __future__ import annotations

import importlib
from typing import Any

from deepspeed.errors import MissingPackageError

__all__ = ["transformers"]


def transformers(module: str = "") -> Any:
    """Return transformers, or a module of it.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        return importlib.import_module(f"transformers.{module}" if module else "transformers")
    except ImportError as cause:
        raise MissingPackageError(
            "sequence parallelism of a Hugging Face model needs transformers, which cannot be imported: pip install "
            f"deepspeed[transformers] ({cause})"
        ) from cause
