"""What is wrong with a configuration, as values, and the one error that lists all of it.

Lives here: `Fault`, the texts, the choice of the error class. Does not live here: what counts as a fault. Called by every
module of this room.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, NoReturn

from pydantic import BaseModel
from pydantic_core import PydanticCustomError

from deepspeed.config.secrets import is_secret, without_secrets
from deepspeed.errors import (
    BatchSizeError,
    ConfigError,
    ElasticityConfigError,
    ElasticityIncompatibleWorldSize,
    UnbuiltFeatureError,
)

__all__ = ["ABSENT", "NVME_NEEDS_A_PLACE", "Fault", "FaultKind", "Refusal", "nearest", "raise_faults", "refuse"]


class _Absent:
    """Stands for the value of a key that was not given."""

    def __repr__(self) -> str:
        return "(not given)"


ABSENT = _Absent()
_LONGEST_VALUE = 80


class FaultKind(Enum):
    """Decides the class of the error: see `raise_faults`."""

    VALUE = "value"
    BATCH = "batch"
    UNBUILT = "unbuilt"
    ELASTIC = "elastic"
    ELASTIC_RANKS = "elastic ranks"


class Fault(NamedTuple):
    """One thing to correct: where, what was given, what was needed, what to do."""

    path: str
    """Dotted path as the user spelled it, such as `zero_optimization.offload_param.device`."""
    given: object
    needed: str
    """Continues "needed ..."; no full stop."""
    cure: str
    """A sentence, or several; empty where `needed` says it all."""
    kind: FaultKind = FaultKind.VALUE

    def __str__(self) -> str:
        """One line of the report; one without a cure, as of the batch triangle, is a text that names its keys itself."""
        if not self.cure:
            return self.needed
        is_hidden = is_secret(self.path) and self.given is not ABSENT  # a log holds the error
        shown = "(hidden)" if is_hidden else _show(self.given)
        return f"{self.path} = {shown}: {self.needed}. {self.cure}"


class Refusal(NamedTuple):
    """A fault as a block sees it: the key is relative to the block and the value is read from there."""

    key: str
    needed: str
    cure: str


NVME_NEEDS_A_PLACE = Refusal("nvme_path", 'needed a directory with device = "nvme"', 'Name one, for example "/local_nvme".')
"""Of every block that puts something there."""


def refuse(needed: str, cure: str = "") -> PydanticCustomError:
    """Make the exception that a validator of one value raises; the base model adds the path, and a cure for an empty one."""
    return PydanticCustomError("refused", "{needed}. {cure}", {"needed": needed, "cure": cure})


def nearest(word: object, known: Iterable[str]) -> str | None:
    """Return the known word most like `word`, or None when none is alike."""
    if not isinstance(word, str):
        return None
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def raise_faults(faults: Sequence[Fault], source_name: str) -> NoReturn:
    """Raise one error that lists every fault.

    Raises:
        BatchSizeError: when one of them is about the batch triangle (clients catch the AssertionError that it is).
        ElasticityConfigError, ElasticityIncompatibleWorldSize: else when one of them is about elasticity.
        UnbuiltFeatureError: when all of them are features that are not built yet.
        ConfigError: otherwise.
    """
    kinds = {fault.kind for fault in faults}
    error: type[ConfigError] = ConfigError
    of_kind = {
        FaultKind.BATCH: BatchSizeError,
        FaultKind.ELASTIC: ElasticityConfigError,
        FaultKind.ELASTIC_RANKS: ElasticityIncompatibleWorldSize,
    }
    found = [special for kind, special in of_kind.items() if kind in kinds]
    if found:
        error = found[0]
    elif kinds == {FaultKind.UNBUILT}:
        error = UnbuiltFeatureError
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    lines = [f"  {number}. {fault}" for number, fault in enumerate(faults, start=1)]
    raise error("\n".join([f"{count} in the configuration ({source_name}):", *lines])) from None


def _show(value: object) -> str:
    """Write a value as JSON, as the user knows it, and cut short what is long; of a block, that it is one."""
    if value is ABSENT:
        return repr(ABSENT)
    if isinstance(value, (Mapping, BaseModel)):
        return "{...}" if value else "{}"
    try:
        text = json.dumps(without_secrets(value), default=repr)
    except (TypeError, ValueError):  # keys that are no texts, or a container that holds itself
        text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
