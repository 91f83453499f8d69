"""The errors of this room, and the sentence that goes with a collective that did not finish."""

from __future__ import annotations

from deepspeed.errors import CommError

__all__ = ["WHERE_TO_LOOK", "NotInitializedError", "PeerFailedError"]

WHERE_TO_LOOK = (
    "Look at the other ranks' output first: the rank that failed earliest has the reason. "
    "If a rank is only slow, raise DEEPSPEED_TIMEOUT (minutes)."
)
"""What to do about a collective that did not finish."""


class NotInitializedError(CommError, AssertionError):
    """A call needs the process group before there is one. Also an AssertionError, which clients of the original catch."""

    def __init__(self, call: str) -> None:
        super().__init__(
            f"{call}() needs the process group, and there is none yet. "
            "Call deepspeed.init_distributed() (or deepspeed.initialize(), which does it) on every rank first."
        )


class PeerFailedError(CommError):
    """Another rank has said why it cannot go on (`comm.watch.Watch.tell_failure`); the text is what it said."""
