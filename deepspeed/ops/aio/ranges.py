"""Which part of a request may go past the page cache. Pure arithmetic.

    file    |....page....|....page....|....page....|....page....|
    request        |=head=|=======direct============|=tail=|
                    buffered       O_DIRECT          buffered

Direct access wants file offsets, lengths and addresses to be multiples of what the device asks for. Whole pages of the
file are asked for here, so that the parts never share a page of the cache: the system keeps the two ways coherent by
page.

Called by `engine`. Does not live here: the cut into blocks, which the back ends do while they go.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PAGE_NBYTES", "DirectPart", "direct_part"]

PAGE_NBYTES = 4096
"""Direct parts begin and end at multiples of this in the file; no disk in use asks for more."""


class DirectPart(NamedTuple):
    """The middle of a request, in bytes from the request's beginning; empty where nothing can go directly."""

    start_nbytes: int
    nbytes: int


def direct_part(offset: int, nbytes: int, address: int, address_alignment: int) -> DirectPart:
    """The largest run of whole pages of the file inside a request, if its bytes are aligned in memory as well.

    Args:
        offset: of the request in the file, bytes.
        nbytes: of the request.
        address: where the request begins in memory.
        address_alignment: what the device asks of addresses; 0 where the file cannot be accessed directly.
    """
    start = -offset % PAGE_NBYTES
    whole = (nbytes - start) // PAGE_NBYTES * PAGE_NBYTES
    if whole <= 0 or address_alignment == 0 or (address + start) % address_alignment != 0:
        return DirectPart(0, 0)
    return DirectPart(start, whole)
