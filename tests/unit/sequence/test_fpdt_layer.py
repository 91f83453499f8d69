"""The published classes of FPDT on one rank: numbers of plain layers, and which tokens a rank has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepspeed import checkpointing
from deepspeed.errors import ArgumentError
from deepspeed.sequence.attention_blocks import MathBlocks
from deepspeed.sequence.fpdt_layer import (
    FPDT_FFN,
    FPDT_InputConstruct,
    FPDT_LogitsLoss,
    SequenceChunk,
    update_out_and_lse,
)
from tests.support import fpdt

ROUNDING = 1e-11
"""fp64 rounds at 1.1e-16; gradients are sums of at most 2,000 products of size ten, in another order."""


def _grads(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output.detach(), *torch.autograd.grad((output * weight).sum(), inputs, retain_graph=True)]


def _assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("chunk_size", [64, 7, 1])
@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize("is_rotated", [False, True])
def test_a_layer_of_chunks_equals_the_plain_one(
    key_heads: int, chunk_size: int, is_offloaded: bool, is_rotated: bool
) -> None:
    weights, x = fpdt.parameters(key_heads), fpdt.hidden(20).requires_grad_()
    rotary = fpdt.angles(20) if is_rotated else None
    expected = _grads(fpdt.plain(weights, key_heads, x, rotary), [x, *weights])
    layer = fpdt.layer(weights, key_heads, chunk_size=chunk_size, enable_offloading=is_offloaded)
    output, bias = layer(x, None, rotary_pos_emb=rotary)
    found = _grads(output + bias, [x, *weights])
    _assert_equal(found, expected)
    _assert_equal(_grads(output + bias, [x, *weights]), expected)  # the graph was kept
    layer.return_bias = False
    both = None if rotary is None else (rotary.cos(), rotary.sin())
    _assert_equal(_grads(layer(x, rotary_pos_emb=both, cpu_offloading=False), [x, *weights]), expected)


def test_a_layer_without_bias_without_gradients_and_in_a_checkpoint() -> None:
    first, _, second, _ = fpdt.parameters(2)
    x = fpdt.hidden(9).requires_grad_()
    zeros = [torch.zeros(len(first), dtype=torch.float64), torch.zeros(fpdt.WIDTH, dtype=torch.float64)]
    plain = fpdt.plain([first, zeros[0], second, zeros[1]], 2, x, None)  # type: ignore[list-item]
    layer = fpdt.layer([first, None, second, None], 2, chunk_size=4)  # type: ignore[list-item]
    output, bias = layer(x)
    assert bias is None
    _assert_equal(_grads(output, [x, first, second]), _grads(plain, [x, first, second]))
    _assert_equal(_grads(checkpointing.checkpoint(lambda given: layer(given)[0], x), [x, first]), _grads(plain, [x, first]))
    with torch.no_grad():
        _assert_equal([layer(x)[0]], [plain.detach()])


def test_a_layer_refuses_what_it_would_not_heed() -> None:
    layer, x = fpdt.layer(fpdt.parameters(2), 2), fpdt.hidden(4)
    with pytest.raises(ArgumentError, match="it is causal and for training"):
        layer(x, torch.ones(1, 1, 4, 4, dtype=torch.bool))
    with pytest.raises(ArgumentError, match="Use fewer ranks, or DistributedAttention"):
        layer._shape(3)
    assert fpdt.layer(fpdt.parameters(1), 1)._shape(2).key_copies == 2


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_chunked_ffn_equals_the_plain_one(has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w1, b1, w2, b2 = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((11, 2, 6), (12, 6), (12,), (6, 12), (6,))
    )
    inputs = [x, w1, w2, *([b1, b2] if has_bias else [])]
    inner = F.gelu(F.linear(x, w1, b1 if has_bias else None), approximate="tanh")
    expected = _grads(F.linear(inner, w2, b2 if has_bias else None), inputs)
    for width in (4, 20):
        output, bias = FPDT_FFN.apply(x * 1.0, w1, b1, w2 * 1.0, b2, has_bias, width)
        assert bias is None
        _assert_equal(_grads(output, inputs), expected)


def test_a_chunked_loss_gives_each_tokens_loss() -> None:
    x, weight = fpdt.hidden(10).requires_grad_(), torch.randn(13, fpdt.WIDTH, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(13, (2, 10))
    plain = F.cross_entropy(F.linear(x, weight).flatten(0, 1), labels.t().flatten(), reduction="none").view(10, 2)
    losses = FPDT_LogitsLoss.apply(x, labels, weight, 0, 1, None, 3)
    _assert_equal(_grads(losses, [x, weight]), _grads(plain, [x, weight]))


@given(pieces=st.integers(1, 9), ranks=st.integers(1, 4), chunk=st.integers(1, 40))
def test_chunks_of_all_ranks_are_stretches_of_the_sequence(pieces: int, ranks: int, chunk: int) -> None:
    tokens = torch.arange(pieces * ranks)[None]
    args: Any = SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=chunk)
    made = [
        FPDT_InputConstruct(tokens, tokens + 1, tokens * 2, None, tokens, args, ranks, rank).generate()
        for rank in range(ranks)
    ]
    mine = [each[0] for each in made]
    whole = torch.cat(mine, 1)  # type: ignore[arg-type]
    assert sorted(whole.flatten().tolist()) == tokens.flatten().tolist()
    for own, labels, mask, _, positions in made:
        assert torch.equal(labels, own + 1)  # type: ignore[operator, arg-type]
        assert torch.equal(mask, whole * 2)  # type: ignore[arg-type]
        assert torch.equal(positions, own)  # type: ignore[arg-type]
    per_chunk = max(1, chunk // ranks)
    for count in [-(-pieces // per_chunk)]:
        for number in range(count):
            start, stop = pieces * number // count, pieces * (number + 1) // count
            together = torch.cat([own[0, start:stop] for own in mine])  # type: ignore[index]
            assert together.tolist() == list(range(start * ranks, stop * ranks))


def test_tokens_that_ranks_do_not_divide_are_told_with_the_cure() -> None:
    args = SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=4)
    with pytest.raises(ArgumentError, match="Pad it to 12 tokens"):
        FPDT_InputConstruct(torch.zeros(1, 10), None, None, None, None, args, 4, 0)


def test_blocks_are_put_together_as_published() -> None:
    q, k, v = (torch.randn(2, 3, 12, 8, dtype=torch.float64) for _ in range(3))
    kernel = MathBlocks()
    whole, whole_lse = kernel.forward(q, k, v, is_causal=False, scale=0.5)
    out, lse = None, None
    for start in (0, 5):
        keys = slice(start, 5 if start == 0 else 12)
        part, part_lse = kernel.forward(q, k[:, :, keys], v[:, :, keys], is_causal=False, scale=0.5)
        out, lse = update_out_and_lse(out, lse, part.transpose(1, 2), part_lse)
    assert out is not None
    assert lse is not None
    _assert_equal([out, lse], [whole.transpose(1, 2), whole_lse.transpose(1, 2).unsqueeze(-1)])
    first, first_lse = kernel.forward(q, k[:, :, :5], v[:, :, :5], is_causal=False, scale=0.5)
    rest, rest_lse = kernel.forward(q[:, :, 4:], k[:, :, 5:], v[:, :, 5:], is_causal=False, scale=0.5)
    out, lse = update_out_and_lse(None, None, first.transpose(1, 2), first_lse)
    places = (slice(None), slice(4, None))
    out, lse = update_out_and_lse(out, lse, rest.transpose(1, 2), rest_lse, places)
    _assert_equal([out[:, 4:]], [whole.transpose(1, 2)[:, 4:]])
    _assert_equal([out[:, :4]], [first.transpose(1, 2)[:, :4]])
    with pytest.raises(ArgumentError, match="Begin with a block of all queries"):
        update_out_and_lse(None, None, first, first_lse, places)


def test_a_chunk_rests_and_comes_back() -> None:
    values = torch.arange(6.0).view(2, 3)
    chunk = SequenceChunk(values.clone())
    assert not chunk.check_gpu_chunk()
    chunk.load_to_gpu()
    assert torch.equal(chunk.get_gpu_chunk(), values)
    assert chunk.check_gpu_chunk()
    chunk.get_gpu_chunk().add_(1)
    chunk.overwrite_to_cpu()
    chunk.offload()
    assert not chunk.check_gpu_chunk()
    assert torch.equal(chunk.get_gpu_chunk(), values + 1)
    assert SequenceChunk(values, is_in_use=True).check_gpu_chunk()
