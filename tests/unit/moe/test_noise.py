from __future__ import annotations

import torch

from deepspeed.moe.noise import gumbel_like, jitter, uniform_like


def test_the_largest_of_logits_and_gumbel_noise_is_a_sample_of_their_softmax() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.7, 0.2, 0.1]).log().expand(20_000, 3)
    counts = torch.bincount((logits + gumbel_like(logits)).argmax(1), minlength=3)
    # five standard deviations of a share: 5 * sqrt(0.25 / 20000)
    torch.testing.assert_close(counts / 20_000, torch.tensor([0.7, 0.2, 0.1]), rtol=0, atol=0.018)


def test_draws_have_the_dtype_and_shape_of_what_they_are_for() -> None:
    logits = torch.zeros(5, 3, dtype=torch.float64)
    for draw in (gumbel_like(logits), uniform_like(logits), jitter(logits)):
        assert (draw.shape, draw.dtype) == (logits.shape, logits.dtype)


def test_jitter_stays_within_its_bounds_and_moves_each_element() -> None:
    torch.manual_seed(0)
    noisy = jitter(torch.ones(1000), epsilon=0.01)
    assert bool(((noisy >= 0.99) & (noisy < 1.01)).all())
    assert noisy.unique().numel() > 900
