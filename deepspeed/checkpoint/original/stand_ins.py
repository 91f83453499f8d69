"""Plain records for the classes that the original's `.pt` files name.

A pickle names a class and gives its attributes. These stand for the named ones: attribute bags without behaviour, so an
archive can be read without the original, and written so that the original reads it.

Lives here: the records and the names they go by. Does not live here: reading (`archive`), writing (`pickles`).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from deepspeed.errors import CheckpointError

__all__ = [
    "GLOBAL_NAMES",
    "READABLE",
    "DynamicLossScaler",
    "FragmentAddress",
    "LossScaler",
    "NumpyRecord",
    "SubparamShape",
    "ZeroStageEnum",
]


class LossScaler:
    """Attributes of a fixed loss scale: `cur_scale`, `dynamic`."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class DynamicLossScaler(LossScaler):
    """Attributes of a moving loss scale: also `cur_iter`, `last_overflow_iter`, `cur_hysteresis`, `scale_window`, ..."""


class ZeroStageEnum(IntEnum):
    """ZeRO stage that wrote a shard."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Its class and value, on every Python: 3.11.0 to 3.11.3 would ask `getattr` for the member by name."""
        return type(self), (self.value,)


def _member(enum: Any, name: Any) -> ZeroStageEnum:
    """`getattr` as archives written under Python 3.11.0 to 3.11.3 use it: a member of `ZeroStageEnum`, and nothing else.

    Raises:
        CheckpointError: anything else is asked for.
    """
    if enum is not ZeroStageEnum or not isinstance(name, str) or name not in ZeroStageEnum.__members__:
        raise CheckpointError(f"the attribute {name!r} of {enum!r} is asked for, which is no member of ZeroStageEnum")
    return ZeroStageEnum[name]


@dataclass(frozen=True)
class FragmentAddress:
    """Where a parameter's fragment lies in a rank's flat partition, in elements."""

    numel: int
    start: int


@dataclass
class SubparamShape:
    """How a fused parameter is made of sub-parameters, as a model states it in `universal_checkpoint_info`."""

    patterns: list[str]
    shape: tuple[Any, ...]
    partition_dim: int


GLOBAL_NAMES: dict[type, str] = {
    LossScaler: "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    DynamicLossScaler: "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    ZeroStageEnum: "deepspeed.runtime.zero.config.ZeroStageEnum",
    FragmentAddress: "deepspeed.utils.tensor_fragment.fragment_address",
    SubparamShape: "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
}
"""Stand-in -> the name that it goes by in a pickle."""


class NumpyRecord:
    """Something of NumPy as a pickle describes it. `value` builds it from checked parts: numbers, booleans and text only.

    NumPy's own unpickling is not used: it trusts the description, and a forged one (objects inside) reads any memory.
    """

    def value(self) -> Any:
        """The NumPy object.

        Raises:
            CheckpointError: it holds objects or is otherwise none of the plain kinds.
        """
        raise NotImplementedError


_PLAIN_KIND = re.compile(r"[biufc]\d+|[SU]\d+|\?")


class NumpyDtype(NumpyRecord):
    """`numpy.dtype`."""

    def __init__(self, kind: str, *_: object) -> None:
        self._kind, self._order = kind, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._order = state[1]

    def value(self) -> np.dtype[Any]:
        """The dtype."""
        if (
            not isinstance(self._kind, str)
            or not _PLAIN_KIND.fullmatch(self._kind)
            or self._order not in ("<", ">", "=", "|")
        ):
            raise CheckpointError(f"NumPy dtype {self._kind!r} in a checkpoint is not one of numbers, booleans or text.")
        return np.dtype(self._order + self._kind if self._order in ("<", ">") else self._kind)


class NumpyArray(NumpyRecord):
    """`numpy.ndarray`."""

    def __init__(self, *_: object) -> None:
        self._state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._state = state

    def value(self) -> np.ndarray[Any, Any]:
        """The array, its own copy of the elements."""
        _, shape, dtype, is_fortran, content = self._state
        if not isinstance(dtype, NumpyDtype) or not isinstance(content, bytes):
            raise CheckpointError(f"a NumPy array in a checkpoint holds {type(content).__name__}, not plain elements.")
        elements = np.frombuffer(content, dtype=dtype.value())
        array: np.ndarray[Any, Any] = elements.reshape(shape, order="F" if is_fortran else "C").copy("A")
        return array


class NumpyScalar(NumpyRecord):
    """A NumPy number."""

    def __init__(self, dtype: Any, content: Any = b"") -> None:
        self._dtype, self._content = dtype, content

    def value(self) -> Any:
        """The number."""
        if not isinstance(self._dtype, NumpyDtype) or not isinstance(self._content, bytes):
            raise CheckpointError(f"a NumPy number in a checkpoint holds {type(self._content).__name__}.")
        return np.frombuffer(self._content, dtype=self._dtype.value())[0]


class _NdarrayName:
    """`numpy.ndarray` where a pickle names it as an argument."""


READABLE: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    *((record, name) for record, name in GLOBAL_NAMES.items()),
    (_member, "builtins.getattr"),
    (argparse.Namespace, "argparse.Namespace"),
    (bytes, "builtins.bytes"),
    (frozenset, "builtins.frozenset"),
    (slice, "builtins.slice"),
    (range, "builtins.range"),
    (NumpyDtype, "numpy.dtype"),
    (_NdarrayName, "numpy.ndarray"),
    *((NumpyArray, f"{place}.multiarray._reconstruct") for place in ("numpy.core", "numpy._core")),
    *((NumpyScalar, f"{place}.multiarray.scalar") for place in ("numpy.core", "numpy._core")),
]
"""What an archive may name besides what torch itself allows: (what stands for it, the name)."""
