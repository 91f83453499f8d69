"""Layers of chunks over ranks that share a sequence: outputs, losses and gradients of one rank that has it whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from deepspeed.sequence.fpdt_layer import FPDT_InputConstruct, FPDT_LogitsLoss
from tests.support import fpdt
from tests.support.ranks import run_ranks

TOKENS, CHUNK, VOCABULARY = 24, 10, 13
ROUNDING = 1e-11
"""As in tests/unit/sequence/test_fpdt_layer.py."""


def _head() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(VOCABULARY, fpdt.WIDTH, generator=generator, dtype=torch.float64).requires_grad_()


def _labels() -> Tensor:
    return torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(6))


def _step(rank: int, world_size: int, key_heads: int, is_offloaded: bool) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """The loss, gradients summed over ranks as the engine's mean makes them, that of this rank's tokens, their places."""
    weights, head = fpdt.parameters(key_heads), _head()
    whole = fpdt.hidden(TOKENS).transpose(0, 1)
    args = SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=CHUNK)
    mask = torch.linspace(0, 1, 2 * TOKENS, dtype=torch.float64).view(2, TOKENS)
    places = torch.arange(TOKENS).expand(2, TOKENS)
    mine, labels, mask, _, positions = FPDT_InputConstruct(
        whole, _labels(), mask, None, places, args, world_size, rank
    ).generate()  # type: ignore[assignment]
    assert mine is not None
    assert positions is not None
    x = mine.transpose(0, 1).contiguous().requires_grad_()
    layer = fpdt.layer(
        weights, key_heads, sequence_process_group=dist.group.WORLD, chunk_size=CHUNK, enable_offloading=is_offloaded
    )
    output, bias = layer(x, rotary_pos_emb=fpdt.angles(TOKENS))
    losses = FPDT_LogitsLoss.apply(output + bias, labels, head, rank, world_size, dist.group.WORLD, 3)
    loss = (losses.t() * mask).sum() / mask.sum()
    loss.backward()
    grads = [each.grad for each in (*weights, head) if each.grad is not None]
    for grad in grads:
        dist.all_reduce(grad)
        grad.div_(world_size)
    assert x.grad is not None
    return loss.detach(), grads, x.grad / world_size, positions[0]


@pytest.mark.parametrize(("world_size", "key_heads"), [(2, 4), (2, 1), (4, 2)])
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_ranks_that_share_a_sequence_train_as_one(world_size: int, key_heads: int, is_offloaded: bool) -> None:
    weights, head, x = fpdt.parameters(key_heads), _head(), fpdt.hidden(TOKENS).requires_grad_()
    mask = torch.linspace(0, 1, 2 * TOKENS, dtype=torch.float64).view(2, TOKENS)
    logits = F.linear(fpdt.plain(weights, key_heads, x, fpdt.angles(TOKENS)), head)
    losses = F.cross_entropy(logits.flatten(0, 1), _labels().t().flatten(), reduction="none").view(TOKENS, 2)
    expected = (losses.t() * mask).sum() / mask.sum()
    expected.backward()
    assert x.grad is not None
    for loss, grads, of_x, places in run_ranks(_step, world_size, key_heads, is_offloaded):
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=ROUNDING)
        for found, each in zip(grads, (*weights, head), strict=True):
            torch.testing.assert_close(found, each.grad, rtol=0, atol=ROUNDING)
        torch.testing.assert_close(of_x, x.grad[places], rtol=0, atol=ROUNDING)
