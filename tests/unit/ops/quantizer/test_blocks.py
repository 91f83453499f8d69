from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepspeed.errors import ArgumentError
from deepspeed.ops.native import library
from deepspeed.ops.quantizer import QuantizedBlocks, dequantize_blocks, quantize_blocks
from deepspeed.ops.quantizer.blocks import dequantize_blocks_twin, quantize_blocks_twin

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
needs_library = pytest.mark.skipif(
    library("quantizer") is None, reason="compares with the native library, which this installation lacks"
)


@pytest.fixture(params=["generic", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this processor has."""
    native = library("quantizer")
    assert native is not None
    choose = native.function("ds_set_isa", ctypes.c_int32, ctypes.c_char_p)
    if choose(request.param.encode()) != 0:
        pytest.skip(f"this processor, or this build, has no {request.param}")
    yield request.param
    assert choose(native.isa.encode()) == 0


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Same bits, but for those of NaN."""
    if one is None or other is None:
        return one is other
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(0.0), other.nan_to_num(0.0))


def _values(numel: int, dtype: torch.dtype) -> Tensor:
    """Values of many sizes, and blocks of 64 with what is special: no number, zeros, subnormals, one value, negatives."""
    values = torch.randn(numel) * torch.rand(numel) * 10
    for block, special in enumerate((math.nan, math.inf, -math.inf, 3e38)):
        values[block * 64 + 1 : block * 64 + 2] = special
    values[256:320] = 0.0
    values[320:384] *= 1e-39
    values[384:448] = -3.25
    values[448:512] = -0.0
    values[512:576] = -values[512:576].abs()
    return values.to(dtype)


@needs_library
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("numel", "block_numel"), [(0, 64), (1, 64), (5001, 64), (5000, 2048), (70_000, 66_000), (200_001, 2**18)]
)
def test_native_codes_and_values_are_the_twins_bit_by_bit(
    isa: str, bits: int, symmetric: bool, dtype: torch.dtype, numel: int, block_numel: int
) -> None:
    torch.set_num_threads(3)
    values = _values(numel, dtype)
    for stochastic in (False, True):
        generator = torch.Generator().manual_seed(7)
        noise = torch.rand(numel, generator=generator) if stochastic else None
        generator.manual_seed(7)
        got = quantize_blocks(values, bits, block_numel, symmetric, stochastic=stochastic, generator=generator)
        twin = quantize_blocks_twin(values, bits, block_numel, symmetric, noise)
        assert all(_equal(one, other) for one, other in zip(got, twin, strict=True))
        for out_dtype in FLOATS:
            back = dequantize_blocks(got, bits, block_numel, numel, out_dtype)
            assert _equal(back, dequantize_blocks_twin(got, bits, block_numel, numel).to(out_dtype))


_numbers = st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda value: value == 0 or abs(value) > 1e-20)


@given(
    values=st.lists(_numbers, max_size=40),
    bits=st.sampled_from([8, 4]),
    symmetric=st.booleans(),
    block_numel=st.sampled_from([2, 6, 16, 64]),
    native=st.booleans(),
)
def test_every_value_comes_back_within_half_a_step(
    values: list[float], bits: int, symmetric: bool, block_numel: int, native: bool
) -> None:
    flat = torch.tensor(values, dtype=torch.float32)
    if native:
        quantized = quantize_blocks(flat, bits, block_numel, symmetric)
        back = dequantize_blocks(quantized, bits, block_numel, flat.numel())
    else:
        quantized = quantize_blocks_twin(flat, bits, block_numel, symmetric)
        back = dequantize_blocks_twin(quantized, bits, block_numel, flat.numel())
    steps = quantized.scales.repeat_interleave(block_numel)[: flat.numel()].double()
    largest = torch.cat([block.abs().max().expand(block.numel()) for block in flat.split(block_numel)]) if values else flat
    # Half a step, and what fp32 rounds off: the product with 1 / scale (2 last places of the code, at most 2^bits), the
    # difference to zero and the sum with it (a last place of the largest value each).
    bound = steps * (0.5 + 2 ** (bits + 1) * 2**-23) + 4 * largest.double() * 2**-24
    assert ((back.double() - flat.double()).abs() <= bound).all()


@given(
    numel=st.integers(0, 70), block_numel=st.sampled_from([2, 16, 64]), bits=st.sampled_from([8, 4]), symmetric=st.booleans()
)
def test_shapes_follow_from_numel_and_block_numel(numel: int, block_numel: int, bits: int, symmetric: bool) -> None:
    codes, scales, zeros = quantize_blocks(torch.randn(numel), bits, block_numel, symmetric)
    assert codes.numel() == (numel if bits == 8 else math.ceil(numel / 2))
    assert scales.numel() == math.ceil(numel / block_numel)
    assert (zeros is None) is symmetric
    assert codes.dtype == (torch.int8 if symmetric and bits == 8 else torch.uint8)


def test_extremes_get_the_extreme_codes_and_zero_gets_zero() -> None:
    values = torch.tensor([-2.0, 0.0, 1.0, 2.0])
    codes, scales, _ = quantize_blocks(values, 8, 4)
    assert codes.tolist() == [-127, 0, 64, 127]  # 63.5 to the even
    assert scales.tolist() == [torch.tensor(2.0).div(127).item()]
    codes, scales, zeros = quantize_blocks(values, 8, 4, symmetric=False)
    assert zeros is not None
    assert (codes.tolist(), zeros.tolist()) == ([0, 128, 191, 255], [-2.0])  # 127.5 to the even


def test_two_codes_share_a_byte_the_first_in_the_low_half() -> None:
    codes, *_ = quantize_blocks(torch.tensor([7.0, -7.0, 1.0]), 4, 4)
    assert codes.tolist() == [0x97, 0x01]


def test_a_block_that_is_not_finite_comes_back_as_nan_and_its_neighbours_whole() -> None:
    values = torch.randn(24)
    for special in (math.nan, math.inf, -math.inf):
        values[9] = special
        for symmetric in (True, False):
            back = dequantize_blocks(quantize_blocks(values, 8, 8, symmetric), 8, 8, 24)
            assert back[8:16].isnan().all()
            assert back[:8].isfinite().all()
            assert back[16:].isfinite().all()


def test_stochastic_rounding_is_right_on_average_repeatable_and_exact_on_integers() -> None:
    values = torch.full((200_000,), 0.3)
    values[0] = 127.0  # the step is 1
    rounded = quantize_blocks(values, 8, 200_000, stochastic=True, generator=torch.Generator().manual_seed(3)).codes
    share = rounded[1:].double().mean().item()
    assert abs(share - 0.3) < 5 * math.sqrt(0.3 * 0.7 / 200_000)  # five standard deviations
    again = quantize_blocks(values, 8, 200_000, stochastic=True, generator=torch.Generator().manual_seed(3)).codes
    assert torch.equal(rounded, again)
    whole = torch.arange(-127.0, 128.0)
    assert torch.equal(quantize_blocks(whole, 8, 255, stochastic=True).codes, whole.to(torch.int8))


def test_any_shape_and_layout_is_taken_as_flat_and_the_result_may_have_a_place() -> None:
    values = torch.randn(6, 10).t()
    quantized = quantize_blocks(values, 8, 16)
    assert torch.equal(quantized.codes, quantize_blocks(values.reshape(-1), 8, 16).codes)
    place = torch.empty(3, 20, dtype=torch.bfloat16)
    assert dequantize_blocks(quantized, 8, 16, 60, out=place) is place
    assert torch.equal(place.flatten(), dequantize_blocks(quantized, 8, 16, 60, torch.bfloat16))


def test_gradients_do_not_flow_and_double_precision_is_taken() -> None:
    values = torch.randn(8, dtype=torch.float64, requires_grad=True)
    quantized = quantize_blocks(values, 8, 8)
    assert not quantized.scales.requires_grad
    back = dequantize_blocks(quantized, 8, 8, 8, torch.float64)
    assert back.dtype == torch.float64
    assert (back - values).abs().max() <= quantized.scales.max() * 0.51


@pytest.mark.parametrize(
    ("given_", "told"),
    [
        ({"bits": 5}, r"bits=5, but 8 or 4"),
        ({"block_numel": 0}, r"block_numel=0"),
        ({"bits": 4, "block_numel": 7}, r"block_numel=7: .*even number is needed, for example 8"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_cure(given_: dict[str, int], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        quantize_blocks(torch.randn(20), **given_)


def test_integers_and_codes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"torch\.int64, but a floating-point one"):
        quantize_blocks(torch.arange(4))
    quantized = quantize_blocks(torch.randn(20), 8, 8)
    with pytest.raises(ArgumentError, match=r"20 codes, 3 scales, .*; 21 codes, 3 scales"):
        dequantize_blocks(quantized, 8, 8, 21)
    with pytest.raises(ArgumentError, match="a contiguous output of 20"):
        dequantize_blocks(quantized, 8, 8, 20, out=torch.empty(5, 8).t()[:, :4])
    with pytest.raises(ArgumentError, match=r"2 scales, .* 3 scales"):
        dequantize_blocks(QuantizedBlocks(quantized.codes, quantized.scales[:2], None), 8, 8, 20)
