from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepspeed.ops.aio.ranges import PAGE_NBYTES, DirectPart, direct_part

LENGTHS = st.integers(0, 5 * PAGE_NBYTES)


@given(offset=LENGTHS, nbytes=LENGTHS, address=LENGTHS, alignment=st.sampled_from([1, 4, 512, 4096]))
def test_a_direct_part_is_whole_pages_of_the_file_and_aligned_in_memory(
    offset: int, nbytes: int, address: int, alignment: int
) -> None:
    start, count = direct_part(offset, nbytes, address, alignment)
    assert start >= 0
    assert start + count <= nbytes
    if count:
        assert (offset + start) % PAGE_NBYTES == count % PAGE_NBYTES == (address + start) % alignment == 0
        assert start < PAGE_NBYTES  # the head
        assert nbytes - start - count < PAGE_NBYTES  # the tail


@given(pages=st.integers(1, 5), first=st.integers(0, 3))
def test_aligned_requests_have_no_edges(pages: int, first: int) -> None:
    assert direct_part(first * PAGE_NBYTES, pages * PAGE_NBYTES, 7 * PAGE_NBYTES, 4096) == (0, pages * PAGE_NBYTES)


def test_without_direct_access_or_a_whole_page_nothing_is_direct() -> None:
    assert direct_part(0, 2 * PAGE_NBYTES, 0, 0) == DirectPart(0, 0)
    assert direct_part(0, PAGE_NBYTES - 1, 0, 1) == DirectPart(0, 0)
    assert direct_part(1, PAGE_NBYTES, 1, 1) == DirectPart(0, 0)
    assert direct_part(0, PAGE_NBYTES, 64, 512) == DirectPart(0, 0)
