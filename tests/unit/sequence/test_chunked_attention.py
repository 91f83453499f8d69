"""Attention over chunks gives the numbers of plain attention, wherever chunks rest."""

from __future__ import annotations

import gc
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.harness.live_bytes import LiveBytes
from deepspeed import checkpointing
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.sequence import attention_blocks
from deepspeed.sequence.attention_blocks import HostFlashBlocks, MathBlocks, merge
from deepspeed.sequence.chunked_attention import HostChunks, chunk_ranges, chunked_attention

ROUNDING = 1e-12
"""fp64 rounds at 1.1e-16; sums of at most 30 terms of size ten in another order differ by less."""


def _qkv(tokens: int, heads: int = 4, key_heads: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(2, heads, tokens, 8), (2, key_heads, tokens, 8), (2, key_heads, tokens, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def _outcome(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    k, v = (each.repeat_interleave(q.size(1) // each.size(1), 1) for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("chunk", [1, 7, 10, 30, 100])
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_chunks_give_the_numbers_of_plain_attention(key_heads: int, chunk: int, is_offloaded: bool) -> None:
    inputs = _qkv(30, key_heads=key_heads)
    expected = _outcome(_plain(*inputs), inputs)
    found = _outcome(chunked_attention(*inputs, chunk, is_offloaded=is_offloaded), inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=ROUNDING)


def test_the_kernel_of_plain_operators_does_too(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _qkv(23)
    expected = _outcome(_plain(*inputs, scale=0.3), inputs)
    monkeypatch.setattr("deepspeed.sequence.chunked_attention.block_kernel", lambda _: MathBlocks())
    for one, other in zip(_outcome(chunked_attention(*inputs, 6, scale=0.3), inputs), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=ROUNDING)


def test_kernels_agree_on_a_block() -> None:
    q, k, v = (each.detach() for each in _qkv(9))
    for is_causal in (True, False):
        results = []
        for kernel in (MathBlocks(), HostFlashBlocks()):
            out, lse = kernel.forward(q, k, v, is_causal=is_causal, scale=0.4)
            grads = kernel.backward(out + 1, q, k, v, out, lse, is_causal=is_causal, scale=0.4)
            results.append([out, lse, *grads])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=ROUNDING)


def test_kernels_are_chosen_by_device_and_dtype() -> None:
    assert isinstance(attention_blocks.block_kernel(_qkv(3)[0]), HostFlashBlocks)
    assert isinstance(attention_blocks.block_kernel(torch.empty(1, 1, 1, 8, device="meta")), MathBlocks)


def test_sixteen_bit_values_are_merged_in_fp32() -> None:
    inputs = _qkv(64, dtype=torch.bfloat16)
    wide = [each.detach().double().requires_grad_() for each in inputs]
    expected, found = _outcome(_plain(*wide), wide), _outcome(chunked_attention(*inputs, 8), inputs)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is torch.bfloat16
        # every factor of the products was rounded to 2**-9, and so is the result
        torch.testing.assert_close(one.double(), other, rtol=2**-6, atol=2**-6)


def test_merging_blocks_in_any_order_gives_the_whole() -> None:
    q, k, v = (each.detach() for each in _qkv(12, key_heads=4))
    kernel = MathBlocks()
    whole, whole_lse = kernel.forward(q, k, v, is_causal=False, scale=0.5)
    for order in ([(0, 5), (5, 12)], [(5, 12), (0, 5)]):
        parts = [kernel.forward(q, k[:, :, a:b], v[:, :, a:b], is_causal=False, scale=0.5) for a, b in order]
        out, lse = parts[0]
        lse = merge(out, lse, *parts[1])
        torch.testing.assert_close(out, whole, rtol=0, atol=ROUNDING)
        torch.testing.assert_close(lse, whole_lse, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_several_backward_passes_and_checkpoints_work(is_offloaded: bool) -> None:
    inputs = _qkv(20)
    expected = _outcome(_plain(*inputs), inputs)
    out = chunked_attention(*inputs, 6, is_offloaded=is_offloaded)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    for keep in (True, False):
        for one, other in zip(
            torch.autograd.grad((out * weight).sum(), inputs, retain_graph=keep), expected[1:], strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=ROUNDING)
    again = checkpointing.checkpoint(lambda *given: chunked_attention(*given, 6, is_offloaded=is_offloaded), *inputs)
    for one, other in zip(_outcome(again, inputs), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=ROUNDING)


def test_without_gradients_it_is_plain_attention() -> None:
    inputs = _qkv(20)
    with torch.no_grad():
        out = chunked_attention(*inputs, 6)
    assert not out.requires_grad
    torch.testing.assert_close(out, _plain(*inputs).detach(), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("is_plain", [False, True])
def test_under_autocast_it_is_torchs_attention(is_plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_plain:
        monkeypatch.setattr("deepspeed.sequence.chunked_attention.block_kernel", lambda _: MathBlocks())
    q, k, v = (torch.randn(2, 2, 10, 8) for _ in range(3))
    mixed = [q.requires_grad_(), k.requires_grad_(), v.bfloat16().requires_grad_()]  # as after a rotary embedding
    found: list[list[Any]] = []
    for attend in (partial(chunked_attention, chunk=3), partial(F.scaled_dot_product_attention, is_causal=True)):
        with torch.autocast("cpu", torch.bfloat16):
            out = attend(*mixed)
            assert out.dtype is torch.bfloat16
            out.float().square().sum().backward()  # in the block, as some do
        found.append([out.detach(), *(each.grad for each in mixed)])
        for each in mixed:
            each.grad = None
    for ours, torchs in zip(*found, strict=True):
        # Bf16 rounds at 2**-9; either side does so to scores, outputs and gradients.
        torch.testing.assert_close(ours, torchs, rtol=0, atol=2**-7 * float(torchs.abs().max()))
    with pytest.raises(ArgumentError, match=r"q is torch.float32, k torch.float32, v torch.bfloat16; needed one dtype"):
        chunked_attention(*mixed)


def test_a_second_backward_without_the_chunks_says_what_to_do() -> None:
    q, k, v = (torch.randn(1, 2, 10, 8, requires_grad=True) for _ in range(3))
    total = chunked_attention(q, k, v, 3, is_offloaded=True).sum()
    total.backward()
    with pytest.raises(UsageError, match="retain_graph=True"):
        total.backward()


@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize(("batch", "tokens"), [(0, 5), (2, 0)])
def test_nothing_attends_to_nothing(batch: int, tokens: int, is_offloaded: bool) -> None:
    q, k, v = (torch.zeros(batch, 2, tokens, 8, requires_grad=True) for _ in range(3))
    out = chunked_attention(q, k, v, 2, is_offloaded=is_offloaded)
    assert out.shape == q.shape
    out.sum().backward()
    assert all(each.grad is not None and each.grad.shape == each.shape for each in (q, k, v))


def test_offloaded_chunks_are_given_back_during_backward_without_the_collector() -> None:
    q, k, v = _qkv(64)
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live:
            out = chunked_attention(q, k, v, 8, is_offloaded=True)
            assert live.now_nbytes == out.nbytes  # what backward needs is elsewhere
            out.sum().backward()
            held = sum(each.grad.nbytes for each in (q, k, v) if each.grad is not None)
            del out
            assert live.now_nbytes == held
    finally:
        gc.enable()


def test_what_rests_in_host_memory_comes_back_as_often_as_it_is_asked_for() -> None:
    place = HostChunks(torch.device("cpu"))
    first, second = torch.randn(2, 3).t(), torch.arange(5)
    held = [place.put(first), place.put(second)]
    for each in held:
        each.bring()
    for _ in range(2):
        assert torch.equal(held[0].value(), first)
        assert torch.equal(held[1].value(), second)


@given(length=st.integers(0, 60), chunk=st.integers(1, 70))
def test_chunks_cover_the_sequence_and_are_no_longer_than_asked(length: int, chunk: int) -> None:
    ranges = chunk_ranges(length, chunk)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == length
    assert all(one[1] == other[0] for one, other in pairwise(ranges))
    assert all(stop - start <= chunk for start, stop in ranges)
    assert len(ranges) == max(1, -(-length // chunk))


def test_what_does_not_fit_is_told_with_the_cure() -> None:
    q, k, v = _qkv(6)
    with pytest.raises(ArgumentError, match="heads of q a multiple"):
        chunked_attention(q[:, :3], k, v)
    with pytest.raises(ArgumentError, match="needed at least 1"):
        chunked_attention(q, k, v, 0)
