"""OpBuilder: what is known of one operator, and the way to the module that serves it.

The name is that of the documented interface, where an operator is compiled at its first use. Here `load` just imports.

Not here: which operators there are (`registry`).
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import ClassVar

from deepspeed.common.logging import get_logger
from deepspeed.errors import UnbuiltFeatureError

__all__ = ["OpBuilder"]

logger = get_logger(__name__)


class OpBuilder:
    """One operator; the subclasses in `registry` say which."""

    NAME: ClassVar[str]
    """Its documented name."""

    BUILD_VAR: ClassVar[str]
    """The variable that asks for it at installation. Nothing reads it while there is no native library to build."""

    SERVED_BY: ClassVar[str | None] = None
    """The module that does its work, or None when this version has nothing for it."""

    def absolute_name(self) -> str:
        """Return the dotted name of the module that serves this operator, or of where it will be."""
        return self.SERVED_BY or f"deepspeed.ops.{self.NAME}"

    def sources(self) -> list[str]:
        """Return the native sources of this operator: none yet."""
        return []

    def reason(self) -> str:
        """Say what serves this operator, or that nothing does."""
        return f"served by {self.SERVED_BY}, on torch's kernels" if self.SERVED_BY else "not built yet in this version"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Tell whether `load` gives something on this machine.

        Args:
            verbose: log the reason when it does not.
        """
        if self.SERVED_BY is None and verbose:
            logger.warning("the op %s is not available: %s.", self.NAME, self.reason())
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

    def builder(self) -> None:
        """Refuse to describe an extension to compile.

        Raises:
            UnbuiltFeatureError: always, while operators have no native sources.
        """
        raise UnbuiltFeatureError(f"the op {self.NAME!r} has nothing to compile: this version has no native sources.")
