"""Which steps `deepspeed --profile-steps` asks ranks to trace, and where they leave the traces.

    deepspeed --profile-steps 5-7 --- DEEPSPEED_PROFILE=JSON ---> deepspeed.initialize --> engine.traced_steps

Pure. Does not live here: the flag (`arguments`), tracing (`engine.traced_steps`, below this room; `deepspeed.initialize`
hands it what it needs).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

__all__ = ["DEFAULT_FOLDER", "VARIABLE", "Tracing", "steps_of"]

VARIABLE = "DEEPSPEED_PROFILE"
"""Environment variable that carries a `Tracing`."""

DEFAULT_FOLDER = "profile"


@dataclass(frozen=True)
class Tracing:
    """A wish for traces."""

    first: int
    """Number of a step as progress lines have it, from 1."""

    last: int
    folder: str
    """Absolute; every rank writes a file of its own."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Tracing | None:
        """What the variable says; None without it."""
        text = environ.get(VARIABLE)
        return cls(**json.loads(text)) if text else None

    def to_text(self) -> str:
        """The variable's value."""
        return json.dumps(asdict(self))


def steps_of(text: str) -> tuple[int, int]:
    """First and last step of `5-7` or `5`.

    Raises:
        argparse.ArgumentTypeError: something else.
    """
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise argparse.ArgumentTypeError(f"{text!r}: needed FIRST-LAST, from 1 and in order, such as 5-7; or one number")
    return first, last
