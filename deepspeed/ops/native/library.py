"""Finding, loading and checking the one shared object; what each function of it takes is said where it is called.

Does not live here: operators. Called by the modules of `deepspeed.ops` that have a native form, and by `ds_report`.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from deepspeed.common.logging import get_logger
from deepspeed.ops.native.environment import is_native_wanted
from deepspeed.ops.native.record import build_record

__all__ = ["ABI_VERSION", "NativeLibrary", "absence", "library"]

ABI_VERSION = 2
"""Of csrc/native.h, as this package calls it."""

_MODULE = "deepspeed.ops.native._deepspeed_native"  # found like an extension module, so that editable installs serve too

_logger = get_logger(__name__)


class NativeLibrary:
    """The loaded library.

    Attributes:
        path: its file.
        isa: instruction set of its kernels on this processor: "avx512", "avx2" or "generic".
        compiler: what built it.
        flags: compiler flags of every file of it.
        isa_flags: compiler flags of its kernels besides, for `isa`.
        operators: names of the operators whose code is in it (`ops.op_builder`).
    """

    def __init__(self, path: Path) -> None:
        """Load `path`.

        Raises:
            OSError: it cannot be loaded, or was built for another version of this package.
        """
        self.path = path
        self._library = ctypes.CDLL(str(path))
        found = self.function("ds_abi_version", ctypes.c_int32)()
        if found != ABI_VERSION:
            raise OSError(f"{path} has interface {found}, this package calls interface {ABI_VERSION}: install it again")
        self.isa = self._text("ds_isa")
        self.compiler = self._text("ds_compiler")
        self.flags = tuple(self._text("ds_flags").split())
        self.isa_flags = tuple(self._text("ds_isa_flags").split())
        self.operators = frozenset(self._text("ds_operators").split(","))

    def function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """The exported function `name`, with its C types; it runs without the interpreter's lock."""
        function = self._library[name]  # by item: each call gives an object of its own
        function.restype = result
        function.argtypes = arguments
        return function

    def _text(self, name: str) -> str:
        told: bytes = self.function(name, ctypes.c_char_p)()
        return told.decode()


def library(operator: str | None = None) -> NativeLibrary | None:
    """The library, loaded at the first call; None where it is absent (`absence` says why).

    Args:
        operator: None also where the library was built without this one: a name of `ops.op_builder`, for example "cpu_adam".
    """
    found = _load()[0]
    return None if found is None or (operator is not None and operator not in found.operators) else found


def absence(operator: str | None = None) -> str | None:
    """Why the library, or its code for `operator`, is not used: half a sentence. None where it is."""
    found, why = _load()
    if found is not None and operator is not None and operator not in found.operators:
        return f"the native library was built without {operator}"
    return why


@cache
def _load() -> tuple[NativeLibrary | None, str | None]:
    if not is_native_wanted():
        return None, "DS_NATIVE=0 is set"
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        return None, build_record().absence or "its file was removed after this package was installed"
    try:
        return NativeLibrary(Path(spec.origin)), None
    except (OSError, AttributeError) as error:  # AttributeError: a function is missing, so it is another version's
        _logger.warning("the native library is not used: %s. Its slower torch twins are.", error)
        return None, f"{spec.origin} does not load: {error}"
