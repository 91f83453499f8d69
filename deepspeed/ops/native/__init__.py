"""The native library: loops in C++ that torch has no single call for, and what says whether it is there.

    csrc/ ---- built with the package ----> _deepspeed_native.so ---- ctypes, at the first use ----> `library()`

Nothing is compiled at run time. Where the library is absent each operator has a twin on torch's own calls, slower and with
the same results; the modules of `deepspeed.ops` choose. See docs/adr/0010-native-library.md.
"""

from __future__ import annotations

from deepspeed.ops.native.library import ABI_VERSION, NativeLibrary, absence, library
from deepspeed.ops.native.record import BuildRecord, build_record

__all__ = ["ABI_VERSION", "BuildRecord", "NativeLibrary", "absence", "build_record", "library"]
