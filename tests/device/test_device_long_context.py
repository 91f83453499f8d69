"""Chunks and tiles on an accelerator: numbers of plain calls, and memory that is really given back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from deepspeed.accelerator import get_accelerator
from deepspeed.sequence.chunked_attention import chunked_attention
from deepspeed.sequence.tiled import TiledMLP

pytestmark = pytest.mark.skipif(get_accelerator().device_name() == "cpu", reason="needs an accelerator, and here is none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_chunks_on_a_device_are_plain_attention(dtype: torch.dtype, is_offloaded: bool) -> None:
    device = get_accelerator().current_device_name()
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 1000, 64, device=device, dtype=dtype, requires_grad=True) for heads in (8, 2, 2)]
    q, k, v = (each.double() for each in inputs)
    plain = F.scaled_dot_product_attention(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1), is_causal=True)
    found = chunked_attention(*inputs, 300, is_offloaded=is_offloaded)
    weight = torch.randn_like(plain)
    expected = [plain, *torch.autograd.grad((plain * weight).sum(), inputs)]
    outcome = [found, *torch.autograd.grad((found * weight).sum(), inputs)]
    # products of fp32 may be rounded to 10 bits on a device, bf16 has 8; sums of 1,000 terms of size one
    atol = 2**-4 if dtype is torch.bfloat16 else 2**-7
    for one, other in zip(outcome, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=2**-5, atol=atol)


def test_tiles_on_a_device_hold_a_tile_at_a_time() -> None:
    device = get_accelerator().current_device_name()
    mlp = torch.nn.Sequential(torch.nn.Linear(256, 4096), torch.nn.Dropout(0.1), torch.nn.Linear(4096, 256)).to(device)
    x = torch.randn(1, 16384, 256, device=device, requires_grad=True)
    TiledMLP.apply(lambda module, tile: module(tile), mlp, x, 16).sum().backward()
    get_accelerator().reset_peak_memory_stats()
    before = get_accelerator().memory_allocated()
    TiledMLP.apply(lambda module, tile: module(tile), mlp, x, 16).sum().backward()
    inner_nbytes = 16384 * 4096 * 4
    assert get_accelerator().max_memory_allocated() - before < inner_nbytes // 2
