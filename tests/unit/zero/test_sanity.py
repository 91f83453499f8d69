"""The hash: every bit and every order counts, whatever the dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero import sanity
from deepspeed.zero.sanity import agree, hash_bits

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex128]


def _random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(numel=st.integers(1, 40), data=st.data())
def test_a_single_flipped_bit_changes_the_hash(numel: int, data: st.DataObject) -> None:
    values = _random_bytes(numel)
    position, bit = data.draw(st.integers(0, numel - 1)), data.draw(st.integers(0, 7))
    before = hash_bits(values)
    values[position] ^= 1 << bit
    assert hash_bits(values) != before


@given(
    numel=st.integers(2, 3000),
    values=st.lists(st.sampled_from([0.0, -0.0, 1.0, 2.0, -1.0, 0.5, 1e-30]), min_size=2, max_size=2, unique_by=str),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_exchanged_elements_change_the_hash(
    numel: int, values: list[float], dtype: torch.dtype, data: st.DataObject
) -> None:
    first, second = data.draw(st.lists(st.integers(0, numel - 1), min_size=2, max_size=2, unique=True))
    tensor = torch.zeros(numel, dtype=dtype)
    tensor[first], tensor[second] = values
    before = hash_bits(tensor)
    tensor[first], tensor[second] = values[::-1]
    assert hash_bits(tensor) != before


def test_round_values_exchanged_over_any_distance_change_the_hash() -> None:
    """Powers of two have many zero bits, which a sum weighted by position alone loses at large distances."""
    base = torch.ones(1 << 14, dtype=torch.float64)
    hashes = set()
    for distance in range(1, 1 << 14):
        base[distance] = 2.0
        hashes.add(int(hash_bits(base)))
        base[distance] = 1.0
    assert len(hashes) == (1 << 14) - 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 3, 8, 13])
def test_every_dtype_and_length_has_a_hash_that_copies_share(dtype: torch.dtype, numel: int) -> None:
    tensor = _random_bytes(16 * 16).view(torch.float64).to(dtype)[:numel]
    assert tensor.numel() == numel
    assert hash_bits(tensor) == hash_bits(tensor.clone())
    shifted = torch.cat([tensor.new_zeros(1), tensor])[1:]  # another place in its storage
    assert hash_bits(tensor) == hash_bits(shifted)
    assert hash_bits(tensor.reshape(1, -1)) == hash_bits(tensor)
    assert hash_bits(tensor).dtype == torch.int64


def test_strided_values_hash_like_their_copy_and_zeros_count_by_number() -> None:
    matrix = torch.arange(12.0).view(3, 4)
    assert hash_bits(matrix.t()) == hash_bits(matrix.t().contiguous())
    assert hash_bits(matrix.t()) != hash_bits(matrix)
    assert len({int(hash_bits(torch.zeros(numel))) for numel in range(20)}) == 20


def test_blocks_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(64, dtype=torch.int64)
    monkeypatch.setattr(sanity, "_BLOCK_WORDS", 16)
    exchanged = torch.cat([values[16:32], values[:16], values[32:]])
    assert hash_bits(values) != hash_bits(exchanged)


def test_nan_is_compared_by_its_bits() -> None:
    assert hash_bits(torch.tensor([float("nan")])) == hash_bits(torch.tensor([float("nan")]))


def test_a_rank_alone_agrees_with_itself() -> None:
    agree([("weight", torch.ones(3))], AxisGroup([0], 0))
