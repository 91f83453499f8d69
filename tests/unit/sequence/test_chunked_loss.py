"""Cross entropy in blocks of rows gives torch's numbers, without fp32 copies of all logits."""

from __future__ import annotations

import copy
import pickle
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.harness.live_bytes import LiveBytes
from deepspeed.errors import ArgumentError
from deepspeed.runtime.chunked_cross_entropy import (
    ChunkedCausalLMLoss,
    chunked_cross_entropy,
    install_chunked_causal_lm_loss,
)

CLASSES = 9


def _case(rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, CLASSES, generator=generator, dtype=torch.float64).mul(5).to(dtype).requires_grad_()
    target = torch.randint(CLASSES, (rows,), generator=generator)
    return logits, target.masked_fill(torch.rand(rows, generator=generator) < 0.3, -100)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 20), block=st.integers(1, 25), reduction=st.sampled_from(["mean", "sum", "none"]))
def test_loss_and_gradient_are_torchs(rows: int, block: int, reduction: Literal["mean", "sum", "none"]) -> None:
    logits, target = _case(rows)
    target[0] = 3  # a mean over none is NaN, as torch has it
    expected = F.cross_entropy(logits, target, reduction=reduction)
    weight = torch.arange(1.0, expected.numel() + 1, dtype=torch.float64).view_as(expected)
    (of_expected,) = torch.autograd.grad((expected * weight).sum(), logits)
    found = chunked_cross_entropy(logits, target, reduction=reduction, block_rows=block)
    (of_found,) = torch.autograd.grad((found * weight).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(of_found, of_expected, rtol=0, atol=1e-12)


def test_leading_dimensions_and_another_ignored_class() -> None:
    logits, target = _case(12)
    target = target.clamp(min=0).view(3, 4)
    found = chunked_cross_entropy(logits.view(3, 4, CLASSES), target, ignore_index=2, reduction="none", block_rows=5)
    expected = F.cross_entropy(logits, target.flatten(), ignore_index=2, reduction="none").view(3, 4)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_sixteen_bit_logits_are_upcast() -> None:
    logits, target = _case(40, torch.bfloat16)
    loss = chunked_cross_entropy(logits, target, block_rows=7)
    (grad,) = torch.autograd.grad(loss, logits)
    wide = logits.detach().float().requires_grad_()
    expected = F.cross_entropy(wide, target)
    (of_expected,) = torch.autograd.grad(expected, wide)
    assert loss.dtype is torch.float32
    assert grad.dtype is torch.bfloat16
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)  # fp32 sums of 40 terms
    torch.testing.assert_close(grad, of_expected.bfloat16(), rtol=2**-7, atol=1e-6)  # one step of bf16


def test_nothing_of_the_size_of_fp32_logits_is_made() -> None:
    logits = torch.randn(256, 500, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(500, (256,))
    with LiveBytes() as live:
        chunked_cross_entropy(logits, target, block_rows=16).backward()
    block_nbytes = 16 * 500 * 4
    assert live.peak_nbytes <= logits.nbytes + 3 * block_nbytes + 64 * 256  # its gradient, a block, and a few rows' values


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss_function: Any = None


def test_the_causal_loss_shifts_and_divides_as_the_usual_one() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, CLASSES, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (2, 6), generator=generator)
    labels[0, :3] = -100
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    expected = F.cross_entropy(logits.flatten(0, 1), shifted.flatten())
    count = (shifted != -100).sum()
    decoder = Decoder()
    loss = install_chunked_causal_lm_loss(decoder, block_rows=5)
    assert decoder.loss_function is loss
    for each in (loss, pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)):
        torch.testing.assert_close(each(logits, labels, CLASSES), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(loss(logits, None, shift_labels=shifted), expected, rtol=0, atol=1e-12)
    for items in (4, torch.tensor(4)):
        divided = loss(logits, labels, vocab_size=CLASSES, num_items_in_batch=items)
        torch.testing.assert_close(divided, expected * count / 4, rtol=0, atol=1e-12)


def test_what_does_not_fit_is_told_with_the_cure() -> None:
    logits, target = _case(6)
    with pytest.raises(ArgumentError, match="Put classes last"):
        chunked_cross_entropy(logits.t(), target)
    with pytest.raises(ArgumentError, match='needed "mean"'):
        chunked_cross_entropy(logits, target, reduction="max")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match='this version has "auto" and "torch"'):
        chunked_cross_entropy(logits, target, backend="cuda")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="needed at least 1"):
        chunked_cross_entropy(logits, target, block_rows=0)
    with pytest.raises(ArgumentError, match="no loss_function"):
        install_chunked_causal_lm_loss(nn.Linear(1, 1))
    with pytest.raises(ArgumentError, match="neither labels nor"):
        ChunkedCausalLMLoss()(logits, None)
