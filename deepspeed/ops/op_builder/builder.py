"""OpBuilder: what is known of one operator, and the way to the module that serves it.

    state       what does the work                                              `load` gives
    native      code in the native library, chosen for this processor           the module
    twin        torch's calls, because the library or that operator is absent   the same module
    torch       torch's or Triton's kernels: there is no native code for it     the module
    none        nothing: this version lacks it                                  UnbuiltFeatureError

The names are those of the documented interface, in which an operator is compiled when a job first needs it. Here everything
was compiled when the package was installed: `load` imports, and no method compiles, waits or writes anything.

Not here: which operators there are (`registry`), and the library itself (`ops.native`).
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, NamedTuple

from deepspeed.common.logging import get_logger
from deepspeed.errors import UnbuiltFeatureError
from deepspeed.ops.native import absence, build_record, library
from deepspeed.ops.op_builder import machine

__all__ = ["NativeExtension", "OpBuilder"]

logger = get_logger(__name__)

State = Literal["native", "twin", "torch", "none"]

_SIMD = {"avx512": "-D__AVX512__", "avx2": "-D__AVX256__", "generic": "-D__SCALAR__"}


class NativeExtension(NamedTuple):
    """What was compiled for an operator, under the names that setuptools' `Extension` has."""

    name: str
    path: Path
    """The file that it went into."""
    sources: list[str]
    include_dirs: list[str]
    extra_compile_args: list[str]
    extra_link_args: list[str]


class OpBuilder:
    """One operator; the subclasses in `registry` say which."""

    NAME: ClassVar[str]
    """Its documented name."""

    BUILD_VAR: ClassVar[str]
    """The variable that asks for it when the package is installed: 1 to fail without it, 0 to leave it out."""

    SERVED_BY: ClassVar[str | None] = None
    """The module that does its work, or None when this version has nothing for it."""

    FOLDER: ClassVar[str | None] = None
    """Folder of csrc/ that holds its native code; None where there is none."""

    TWIN_COST: ClassVar[str] = ""
    """What the twin takes, by benchmarks/native_twins.py on two cores: "3 times as long"; empty where nobody measured."""

    # ---------------------------------------------------------------- what serves it

    def absolute_name(self) -> str:
        """Return the dotted name of the module that serves this operator, or of where it will be."""
        return self.SERVED_BY or f"deepspeed.ops.{self.NAME}"

    def state(self) -> State:
        """Say what does this operator's work in this process; the module's docstring lists the answers."""
        if self.SERVED_BY is None:
            return "none"
        if self.FOLDER is None:
            return "torch"
        return "twin" if library(self.NAME) is None else "native"

    def reason(self) -> str:
        """Say in one line what serves this operator, or why nothing does."""
        state, found = self.state(), library(self.NAME)
        if state == "native" and found is not None:
            return f"native code for {found.isa}, through {self.SERVED_BY}"
        if state == "twin":
            why = (absence(self.NAME) or "").partition(". The compiler's first error:")[0].splitlines()[0].rstrip(". ")
            cost = f"; it takes about {self.TWIN_COST}" if self.TWIN_COST else ""
            return f"torch twin in {self.SERVED_BY}: {why}{cost}"
        return f"served by {self.SERVED_BY}, on torch's kernels" if state == "torch" else "not built yet in this version"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Tell whether `load` gives something on this machine.

        Args:
            verbose: log the reason when it does not.
        """
        if self.SERVED_BY is None and verbose:
            self.warning(f"the op {self.NAME} is not available: {self.reason()}.")
        return self.SERVED_BY is not None

    def load(self, verbose: bool = False) -> ModuleType:
        """Import and return the module that serves this operator.

        Args:
            verbose: accepted for the documented interface; there is no compilation to report.

        Raises:
            UnbuiltFeatureError: nothing serves it.
        """
        if self.SERVED_BY is None:
            raise UnbuiltFeatureError(f"the op {self.NAME!r} is {self.reason()}: do without it, or use a later version.")
        return importlib.import_module(self.SERVED_BY)

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """As `load`: there is nothing left to compile when a job runs."""
        return self.load(verbose)

    # ---------------------------------------------------------------- what was compiled

    def sources(self) -> list[str]:
        """Return the native sources that were compiled for this operator, as paths in the repository."""
        found = library(self.NAME)
        if found is None or self.FOLDER is None:
            return []
        return [path for path in build_record().sources if Path(path).parent.name == self.FOLDER]

    def include_paths(self) -> list[str]:
        """Return the folders of headers, as paths in the repository."""
        return ["csrc"] if self.FOLDER else []

    def cxx_args(self) -> list[str]:
        """Return the compiler's flags: of all files, and of the kernels for this processor."""
        found = library(self.NAME) if self.FOLDER else None
        return [] if found is None else [*found.flags, *found.isa_flags]

    def nvcc_args(self) -> list[str]:
        """Return flags for nvcc: none, because kernels for GPUs are torch's and Triton's."""
        return []

    def extra_ldflags(self) -> list[str]:
        """Return the linker's flags beyond the usual: the library needs the C library alone."""
        return ["-static-libstdc++", "-static-libgcc"] if self.cxx_args() else []

    def libraries_args(self) -> list[str]:
        """Return libraries that are linked in by name: none."""
        return []

    def builder(self) -> NativeExtension:
        """Describe what was compiled for this operator when the package was installed.

        Raises:
            UnbuiltFeatureError: it has no native code, or that was not compiled.
        """
        if self.FOLDER is None:
            raise UnbuiltFeatureError(f"the op {self.NAME!r} has nothing to compile: it is {self.reason()}.")
        found = library(self.NAME)
        if found is None:
            raise UnbuiltFeatureError(
                f"the op {self.NAME!r} was asked for what was compiled for it, but {absence(self.NAME)}. "
                f"Install the package again with {self.BUILD_VAR}=1, which shows what stands in the way."
            )
        return NativeExtension(
            self.absolute_name(), found.path, self.sources(), self.include_paths(), self.cxx_args(), self.extra_ldflags()
        )

    # ---------------------------------------------------------------- the machine

    def cpu_arch(self) -> str:
        """Return the flags for the instruction set of the kernels in use; empty for the plainest and without any."""
        found = library(self.NAME) if self.FOLDER else None
        return "" if found is None else " ".join(found.isa_flags)

    def simd_width(self) -> str:
        """Return the width of the kernels in use: -D__AVX512__, -D__AVX256__, or -D__SCALAR__, also without native code."""
        found = library(self.NAME) if self.FOLDER else None
        return _SIMD["generic" if found is None else found.isa]

    def command_exists(self, cmd: str | list[str]) -> bool:
        """Tell whether a command, or one of several, is on PATH; warn when none is."""
        commands = [cmd] if isinstance(cmd, str) else list(cmd)
        found = machine.has_command(commands)
        if not found:
            self.warning(f"{self.NAME} was asked for the command {' or '.join(commands)}, and PATH has none of that name.")
        return found

    def has_function(
        self, funcname: str, libraries: list[str], library_dirs: list[str] | None = None, verbose: bool = False
    ) -> bool:
        """Tell whether one of the system's shared libraries has a function. Nothing is compiled to find out.

        Args:
            funcname: name of the function.
            libraries: names as a linker takes them, for example `["aio"]`.
            library_dirs: folders to look in first.
            verbose: warn when it is not there.
        """
        found = machine.has_function(funcname, libraries, library_dirs or [])
        if verbose and not found:
            self.warning(f"{self.NAME}: none of the libraries {libraries} has the function {funcname}.")
        return found

    def validate_torch_version(self, torch_info: Any) -> None:
        """Do nothing: the native library knows nothing of torch, so every version of torch is right for it."""

    def validate_torch_op_version(self, torch_info: Any) -> None:
        """Do nothing, as `validate_torch_version`."""

    def warning(self, msg: str) -> None:
        """Log a warning."""
        logger.warning("%s", msg)
