"""The seam between the engine and what carries requests out.

A back end takes a `Transfer` and gives a `Ticket`. It cuts the middle into blocks, keeps several in flight, and moves the
head and the tail when the middle is done ([Note: the edges come last]). It knows descriptors and addresses only; files,
tensors and errors are the engine's.

[Note: the edges come last] A direct write drops the pages of the cache that it touches. While head and tail wait for it,
no page that they dirty can be dropped with older bytes of the middle beside them.

Implementations: `threads` (Python) and `native` (csrc/io).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

__all__ = ["Backend", "Outcome", "Ticket", "Transfer"]


class Transfer(NamedTuple):
    """One request, as a back end sees it. Addresses stay valid until its ticket is done.

    The middle is never empty: where nothing can go past the page cache, it is the whole request and `middle_fd` is
    `edge_fd`.
    """

    is_write: bool
    middle_fd: int
    """Opened with O_DIRECT where the middle is aligned."""
    edge_fd: int
    """Not so, for head, tail and what is left of a block that was cut short."""
    offset: int
    nbytes: int
    address: int
    middle_start: int
    """Bytes before the middle."""
    middle_nbytes: int


class Outcome(NamedTuple):
    """What became of a request."""

    number: int
    """0, or the errno of the first block (by offset) that failed; ENODATA where the file ended before the request."""
    moved_nbytes: int
    """Bytes from the beginning of the request up to the first that was not moved."""


class Ticket(Protocol):
    """A request in flight."""

    def wait(self, seconds: float) -> bool:
        """Wait at most so long; whether it is done."""

    def outcome(self) -> Outcome:
        """What became of it. Only when it is done."""


class Backend(Protocol):
    """Carries out transfers. Its methods may be called from any thread of the process that made it.

    Attributes:
        kind: "io_uring", "libaio" or "threads".
    """

    kind: str

    def submit(self, transfer: Transfer) -> Ticket:
        """Begin a transfer of at least one byte. Does not wait for the disk."""

    def close(self) -> None:
        """Wait for everything that was submitted and end all threads. Called once."""
