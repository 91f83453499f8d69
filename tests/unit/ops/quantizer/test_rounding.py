from __future__ import annotations

import pytest
import torch

from deepspeed.errors import ArgumentError
from deepspeed.ops.quantizer import ds_quantizer
from deepspeed.ops.quantizer.arithmetic import block_scale, codes_of, values_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [2, 3, 4, 8, 12])
@pytest.mark.parametrize("asym", [False, True])
def test_each_group_takes_at_most_as_many_values_as_the_bits_tell(dtype: torch.dtype, bits: int, asym: bool) -> None:
    given = torch.randn(6, 50).to(dtype)
    rounded = ds_quantizer(given, groups=3, bit_num=bits, asym=asym)
    assert (rounded.shape, rounded.dtype) == (given.shape, dtype)
    for before, after in zip(given.view(3, 100).float(), rounded.view(3, 100).float(), strict=True):
        assert after.unique().numel() <= 2**bits
        low, high = (before.min(), before.max()) if asym else (-before.abs().max(), before.abs().max())
        step = (high - low) / (2**bits - (1 if asym else 2))
        # Half a step, and the rounding of the result: 2^-8 of it for bf16, which has the fewest digits.
        assert ((after - before).abs() <= step * 0.501 + before.abs() * 2**-8 + step * 2**-8).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("asym", [False, True])
def test_stored_integers_and_those_of_any_number_of_bits_follow_one_arithmetic(bits: int, asym: bool) -> None:
    given = torch.randn(4, 64)
    values = given.view(4, -1)
    scale = block_scale(values, bits, not asym)
    assert torch.equal(ds_quantizer(given, 4, bits, asym=asym), values_of(codes_of(values, scale), scale))


def test_stochastic_rounding_takes_one_of_the_two_neighbours() -> None:
    given = torch.rand(1000) * 2 - 1
    given[0] = 1.0
    near = ds_quantizer(given, bit_num=6)
    generator = torch.Generator().manual_seed(0)
    rounded = ds_quantizer(given, bit_num=6, sr=True, generator=generator)
    assert not torch.equal(near, rounded)
    assert (rounded - given).abs().max() < 1.0 / 31
    assert torch.equal(rounded, ds_quantizer(given, bit_num=6, sr=True, generator=generator.manual_seed(0)))


def test_the_given_tensor_stays_as_it_is_also_when_empty() -> None:
    given = torch.randn(10, requires_grad=True)
    before = given.detach().clone()
    assert not ds_quantizer(given, 2, 4).requires_grad
    assert torch.equal(given.detach(), before)
    assert ds_quantizer(torch.empty(0, 3)).shape == (0, 3)


def test_what_cannot_be_done_is_refused_with_the_cure() -> None:
    with pytest.raises(ArgumentError, match=r"groups=3 for 10 elements of shape \(10,\).*Choose a divisor"):
        ds_quantizer(torch.randn(10), 3)
    with pytest.raises(ArgumentError, match=r"bit_num=17, but .* 2 to 16 bits"):
        ds_quantizer(torch.randn(10), bit_num=17)
    with pytest.raises(ArgumentError, match=r"torch\.int32"):
        ds_quantizer(torch.ones(4, dtype=torch.int32))
