from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.comm.mean import BLOCK_NUMEL, BlockMean, MeanRule, check_range, divide_, own_part
from deepspeed.errors import ArgumentError


@given(
    start=st.integers(0, 1000),
    numel=st.integers(0, 1000),
    world_size=st.integers(1, 9),
    alignment=st.sampled_from([1, 4, 16, 64]),
)
def test_parts_cover_a_range_once_in_rank_order(start: int, numel: int, world_size: int, alignment: int) -> None:
    parts = [own_part(start, start + numel, rank, world_size, alignment) for rank in range(world_size)]

    assert [e for low, high in parts for e in range(low, high)] == list(range(start, start + numel))


@given(start=st.integers(0, 1000), numel=st.integers(0, 1000), world_size=st.integers(1, 9))
def test_two_parts_share_no_aligned_block(start: int, numel: int, world_size: int) -> None:
    parts = [own_part(start, start + numel, rank, world_size, 16) for rank in range(world_size)]
    blocks = [{e // 16 for e in range(low, high)} for low, high in parts]

    assert sum(len(each) for each in blocks) == len(set().union(*blocks))


@given(numel=st.integers(0, 10**6), world_size=st.integers(1, 64))
def test_parts_differ_by_less_than_the_alignment_and_one(numel: int, world_size: int) -> None:
    sizes = [high - low for low, high in (own_part(0, numel, rank, world_size, 16) for rank in range(world_size))]

    assert max(sizes) - min(sizes) <= 2 * 16


def test_a_rule_divides_as_documented() -> None:
    assert (MeanRule(4).before, MeanRule(4).after) == (1.0, 4.0)
    assert (MeanRule(4, prescale=True).before, MeanRule(4, prescale=True).after) == (4.0, 1.0)
    assert (MeanRule(4, predivide_factor=2.0).before, MeanRule(4, predivide_factor=2.0).after) == (2.0, 2.0)


@given(world_size=st.integers(1, 10**6), prescale=st.booleans(), factor=st.floats(0.01, 1e6))
def test_both_divisions_make_the_world_size(world_size: int, prescale: bool, factor: float) -> None:
    rule = MeanRule(world_size, prescale, factor)

    assert rule.before * rule.after == pytest.approx(world_size, rel=1e-12)


@pytest.mark.parametrize("divisor", [1.0, 2.0, 0.25, 3.0, 10.0, 1024.0])
def test_divide_is_the_correctly_rounded_quotient(divisor: float) -> None:
    values = torch.randn(1000)
    divided = values.clone()

    divide_(divided, divisor)

    assert torch.equal(divided, values / divisor)


@pytest.mark.parametrize("bounds", [(-1, 3), (3, 2), (0, 11), (11, 11)])
def test_a_range_outside_the_buffer_is_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match=r"range .* for a buffer of 10 elements"):
        check_range(*bounds, 10)


def _rows(world_size: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Values over many magnitudes: sums round and cancel."""
    magnitude = torch.exp2(torch.randint(-8, 9, (numel,)).float())
    return [(torch.randn(numel) * magnitude * torch.exp2(torch.tensor(float(-3 * r)))).to(dtype) for r in range(world_size)]


def _mean_in_row_order(rows: list[torch.Tensor]) -> torch.Tensor:
    wide = torch.promote_types(rows[0].dtype, torch.float32)
    total = rows[0].to(wide)
    for row in rows[1:]:
        total = total + row.to(wide)
    return (total / len(rows)).to(rows[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_row_gets_the_mean_summed_in_row_order_and_rounded_once(world_size: int, dtype: torch.dtype) -> None:
    rows = _rows(world_size, BLOCK_NUMEL + 1000, dtype)
    expected = _mean_in_row_order(rows)
    before = [row.clone() for row in rows]

    BlockMean(dtype, dtype, MeanRule(world_size)).write(rows, 3, BLOCK_NUMEL + 990)

    for row, old in zip(rows, before, strict=True):
        assert torch.equal(row[3:-10], expected[3:-10])
        assert torch.equal(row[:3], old[:3])
        assert torch.equal(row[-10:], old[-10:])


def test_two_16_bit_rows_of_any_magnitudes_give_the_rounded_mean() -> None:
    """The case with a shortcut of its own; every exponent against every exponent."""
    exponents = torch.arange(-120.0, 121.0)
    a = torch.randn(241, 241) * torch.exp2(exponents)[:, None]
    b = torch.randn(241, 241) * torch.exp2(exponents)[None, :]
    rows = [a.flatten().bfloat16(), b.flatten().bfloat16()]
    expected = _mean_in_row_order(rows)

    BlockMean(torch.bfloat16, torch.bfloat16, MeanRule(2)).write(rows, 0, rows[0].numel())

    assert torch.equal(rows[0], expected)
    assert torch.equal(rows[1], expected)


def test_two_16_bit_rows_that_nearly_cancel_lose_nothing() -> None:
    a = torch.randn(10000).half()
    rows = [a.clone(), -a + torch.randn(10000).half() * 2**-10]
    expected = _mean_in_row_order(rows)

    BlockMean(torch.float16, torch.float16, MeanRule(2)).write(rows, 0, 10000)

    assert torch.equal(rows[0], expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_fp16_rows_whose_sum_overflows_still_have_a_mean(world_size: int) -> None:
    rows = [torch.full((4,), 60000.0, dtype=torch.float16) for _ in range(world_size)]

    BlockMean(torch.float16, torch.float16, MeanRule(world_size)).write(rows, 0, 4)

    assert rows[0].tolist() == [torch.tensor(60000.0).half().item()] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_non_finite_contribution_makes_a_non_finite_mean(dtype: torch.dtype, bad: float) -> None:
    rows = [torch.zeros(4, dtype=dtype), torch.tensor([bad, 0, 0, 0], dtype=dtype)]

    BlockMean(dtype, dtype, MeanRule(2)).write(rows, 0, 4)

    assert [row.isfinite().tolist() for row in rows] == [[False, True, True, True]] * 2


def test_a_wider_communication_dtype_sums_in_it() -> None:
    rows = _rows(3, 1000, torch.float32)
    expected = ((rows[0].double() + rows[1].double() + rows[2].double()) / 3).float()

    BlockMean(torch.float32, torch.float64, MeanRule(3)).write(rows, 0, 1000)

    assert all(torch.equal(row, expected) for row in rows)


def test_a_narrower_communication_dtype_rounds_what_travels_and_what_comes_back() -> None:
    rows = _rows(3, 1000, torch.float32)
    sent = [row.bfloat16().float() for row in rows]
    expected = ((sent[0] + sent[1] + sent[2]) / 3).bfloat16().float()

    BlockMean(torch.float32, torch.bfloat16, MeanRule(3)).write(rows, 0, 1000)

    assert all(torch.equal(row, expected) for row in rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rule", [MeanRule(3, prescale=True), MeanRule(3, predivide_factor=7.0)])
def test_a_division_before_the_sum_rounds_as_the_back_end_would(dtype: torch.dtype, rule: MeanRule) -> None:
    rows = _rows(3, 1000, dtype)
    sent = [(row / rule.before).float() for row in rows]
    expected = ((sent[0] + sent[1] + sent[2]) / rule.after).to(dtype)

    BlockMean(dtype, dtype, rule).write(rows, 0, 1000)

    assert all(torch.equal(row, expected) for row in rows)


# -------------------------------------------------------------------- into a shard

_RULES = [
    MeanRule(3),
    MeanRule(3, prescale=True),
    MeanRule(3, predivide_factor=7.0),
    MeanRule(2),
    MeanRule(2, prescale=True),
]
_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("rule", _RULES, ids=str)
@pytest.mark.parametrize("communication_dtype", _DTYPES)
@pytest.mark.parametrize("dtype", _DTYPES)
def test_a_shard_gets_the_bits_that_every_row_would_get(
    dtype: torch.dtype, communication_dtype: torch.dtype, rule: MeanRule
) -> None:
    rows = _rows(rule.world_size, BLOCK_NUMEL + 1000, dtype)
    written = [row.clone() for row in rows]
    before = [row.clone() for row in rows]
    start, stop = 7, BLOCK_NUMEL + 990
    mean = BlockMean(dtype, communication_dtype, rule)
    mean.write(written, start, stop)
    expected = written[0][start:stop]

    for into_dtype in _DTYPES:
        shard = torch.full((stop - start,), torch.nan, dtype=into_dtype)
        mean.reduce(rows, start, stop, shard)
        assert torch.equal(shard.nan_to_num(), expected.to(into_dtype).nan_to_num())
    assert all(torch.equal(row, old) for row, old in zip(rows, before, strict=True))


@pytest.mark.parametrize("own", [0, 1, 2])
@pytest.mark.parametrize("rule", _RULES[:3], ids=str)
@pytest.mark.parametrize("dtype", _DTYPES)
def test_a_shard_may_be_the_range_of_any_row(dtype: torch.dtype, rule: MeanRule, own: int) -> None:
    rows = _rows(3, 1000, dtype)
    written = [row.clone() for row in rows]
    mean = BlockMean(dtype, dtype, rule)
    mean.write(written, 10, 990)

    mean.reduce(rows, 10, 990, rows[own][10:990])

    assert torch.equal(rows[own][10:990], written[0][10:990])


@pytest.mark.parametrize("into_dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3])
def test_accumulating_adds_the_rounded_mean_and_rounds_once(
    world_size: int, dtype: torch.dtype, into_dtype: torch.dtype
) -> None:
    rows = _rows(world_size, BLOCK_NUMEL + 10, dtype)
    mean = BlockMean(dtype, dtype, MeanRule(world_size))
    rounded = torch.empty(BLOCK_NUMEL + 10, dtype=dtype)
    mean.reduce(rows, 0, BLOCK_NUMEL + 10, rounded)
    shard = torch.randn(BLOCK_NUMEL + 10).to(into_dtype)
    expected = (shard.to(torch.promote_types(dtype, into_dtype)) + rounded).to(into_dtype)

    mean.reduce(rows, 0, BLOCK_NUMEL + 10, shard, accumulate=True)

    assert torch.equal(shard, expected)
