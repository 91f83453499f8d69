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
from deepspeed.ops.op_builder.environment import is_native_wanted

__all__ = ["ABI_VERSION", "NativeLibrary", "absence", "library"]

ABI_VERSION = 1
"""Of csrc/native.h, as this package calls it."""

_MODULE = "deepspeed.ops.native._deepspeed_native"  # found like an extension module, so that editable installs serve too

_logger = get_logger(__name__)


class NativeLibrary:
    """The loaded library.

    Attributes:
        path: its file.
        isa: instruction set of its kernels on this processor: "avx512", "avx2" or "generic".
        compiler: what built it.
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
        self.isa: str = self.function("ds_isa", ctypes.c_char_p)().decode()
        self.compiler: str = self.function("ds_compiler", ctypes.c_char_p)().decode()

    def function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """The exported function `name`, with its C types; it runs without the interpreter's lock."""
        function = self._library[name]  # by item: each call gives an object of its own
        function.restype = result
        function.argtypes = arguments
        return function


@cache
def library() -> NativeLibrary | None:
    """The library, loaded at the first call; None where it is absent (`absence` says why)."""
    return _load()[0]


def absence() -> str | None:
    """Why the library is not used; None where it is."""
    return _load()[1]


@cache
def _load() -> tuple[NativeLibrary | None, str | None]:
    if not is_native_wanted():
        return None, "DS_NATIVE=0 is set"
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        return None, "this installation was made without a C++ compiler"
    try:
        return NativeLibrary(Path(spec.origin)), None
    except OSError as error:
        _logger.warning("the native library is not used: %s. Its slower torch twins are.", error)
        return None, str(error)
