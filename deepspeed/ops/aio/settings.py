"""How files are read and written: the `aio` block of the configuration, under the names of this room.

Lives here: `IoSettings`. Does not live here: the choice of a back end (`engine`). Called by whoever builds an `IoEngine`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from typing_extensions import Self

from deepspeed.config.memory import AioConfig
from deepspeed.errors import ArgumentError
from deepspeed.ops.aio.ranges import PAGE_NBYTES

__all__ = ["IoKind", "IoSettings"]

IoKind = Literal["auto", "io_uring", "libaio", "threads"]
"""What carries out requests; "auto" takes the first that this system has."""

_MOST = {"block_nbytes": 1 << 30, "queue_depth": 4096, "threads": 64}
"""Far beyond what helps; more would only take memory and threads, and fail late."""

_KINDS = ("auto", "io_uring", "libaio", "threads")


@dataclass(frozen=True)
class IoSettings:
    """How requests are cut up and how much of them is in flight; which bytes move does not depend on it."""

    block_nbytes: int = 1 << 20
    """Bytes that are asked of the system at a time; rounded up to whole pages."""

    queue_depth: int = 8
    """Blocks in flight for each of the `threads`."""

    threads: int = 1
    """Threads that submit blocks and take their results. The kind "threads" has `threads * queue_depth` of them (at most
    64), because there each block in flight occupies one."""

    kind: IoKind = "auto"
    """What carries requests out; another than "auto" is an error where this system does not have it."""

    single_submit: bool = False
    """Hand blocks to the system one at a time, instead of as many as there is room for. No meaning for "threads"."""

    overlap_events: bool = True
    """Fill up the queue as soon as one block is done. False: when all of them are. No meaning for "threads"."""

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ArgumentError(
                    f"{name}={value!r} was given for reading and writing files, but it is a whole number from 1 to {most}. "
                    "Give one; ds_nvme_tune finds what suits a disk."
                )
        if self.kind not in _KINDS:
            raise ArgumentError(f"IoSettings(kind={self.kind!r}), but there are only {', '.join(_KINDS)}. Give one of them.")

    @property
    def whole_block_nbytes(self) -> int:
        """`block_nbytes`, rounded up to whole pages."""
        return -(-self.block_nbytes // PAGE_NBYTES) * PAGE_NBYTES

    @classmethod
    def of(cls, config: AioConfig) -> Self:
        """The settings that an `aio` block asks for; `use_gds` is not theirs (`gds`)."""
        return cls(
            block_nbytes=config.block_size,
            queue_depth=config.queue_depth,
            threads=config.intra_op_parallelism,
            single_submit=config.single_submit,
            overlap_events=config.overlap_events,
        )
