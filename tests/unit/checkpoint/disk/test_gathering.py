"""Bytes of parts out of bytes of other parts, in blocks of rows and in runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.disk import gathering
from deepspeed.checkpoint.disk.gathering import gather_rows
from deepspeed.sharding import Cut, rows_of
from tests.support.random_cuts import part_of, stored_of, two_cuts


def _gather(stored: Cut, wanted: Cut, rank: int, whole: Any) -> tuple[Any, list[tuple[int, int]]]:
    """What a rank's part is read as, and the (first byte, bytes) of each read."""
    lying, asked = stored_of(stored, whole).tobytes(), []
    out = np.empty(part_of(wanted, whole, rank).shape, dtype=whole.dtype)

    def read(start: int, into: memoryview) -> None:
        asked.append((start * whole.itemsize, len(into)))
        into[:] = lying[start * whole.itemsize : start * whole.itemsize + len(into)]

    rows = rows_of(stored, wanted, rank, 0, out.size)
    if out.size:
        gather_rows(rows, whole.itemsize, read, out.reshape(-1).view(np.uint8).data)
    return out, asked


@pytest.mark.parametrize(("long_nbytes", "block_nbytes"), [(0, 1), (1 << 10, 1 << 10), (1 << 10, 8), (12, 40)])
@given(cuts=two_cuts(), dtype=st.sampled_from(["u1", "<i4", "<i8"]))
def test_parts_are_the_same_however_they_are_read(
    long_nbytes: int, block_nbytes: int, cuts: tuple[Cut, Cut], dtype: str
) -> None:
    stored, wanted = cuts
    whole = np.arange(np.prod(stored.shape), dtype=dtype).reshape(stored.shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "_LONG_NBYTES", long_nbytes)
        patch.setattr(gathering, "_BLOCK_NBYTES", block_nbytes)
        for rank in range(wanted.ranks):
            assert np.array_equal(_gather(stored, wanted, rank, whole)[0], part_of(wanted, whole, rank))


def test_short_rows_are_read_in_few_blocks() -> None:
    whole = np.arange(4096 * 8, dtype="<i4").reshape(4096, 8)
    stored, wanted = (Cut.of_widths(whole.shape, 1, [8 // ranks] * ranks) for ranks in (2, 4))
    part, asked = _gather(stored, wanted, 1, whole)
    assert np.array_equal(part, whole[:, 2:4])
    assert len(asked) == 1


def test_along_the_first_dimension_no_other_bytes_are_read() -> None:
    whole = np.arange(64 * 1024, dtype="<i4").reshape(64, 1024)
    sections = [[16, 16], [8, 8], [8, 8]]
    stored = Cut.of_widths(whole.shape, 0, *sections)
    wanted = Cut.of_widths(whole.shape, 0, *([width // 2] * 4 for width, _ in sections))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "_LONG_NBYTES", 1 << 10)
        part, asked = _gather(stored, wanted, 1, whole)
    assert sum(nbytes for _, nbytes in asked) == part.nbytes
    assert len(asked) == len(sections)
