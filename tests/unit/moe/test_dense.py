from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.moe.sharded_moe import top1gating, top2gating, topkgating
from tests.support.plain_moe import balance_loss, kept_pairs, weights_of

GATINGS: dict[str, tuple[Any, dict[str, Any], int, str]] = {
    "one": (top1gating, {"use_rts": False}, 1, ""),
    "two": (top2gating, {"top2_2nd_expert_sampling": False}, 2, ""),
    "three": (topkgating, {"k": 3}, 3, "probs"),
    "two by position": (topkgating, {"k": 2, "drop_policy": "position"}, 2, "position"),
}


def _logits(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(13, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("name", GATINGS)
def test_the_published_tensors_are_those_of_the_papers(name: str, drops: bool) -> None:
    gating, arguments, k, policy = GATINGS[name]
    logits = _logits()
    capacity = max(1, -(-13 * k // 8)) if drops else None
    l_aux, combine, mask, counts = gating(logits, capacity_factor=0.5, min_capacity=1, drop_tokens=drops, **arguments)
    pairs = kept_pairs(logits, k, capacity, policy)
    assert combine.shape == mask.shape == (13, 4, capacity or int(counts.max()))
    torch.testing.assert_close(combine.sum(2), weights_of(logits, pairs, k), rtol=1e-12, atol=0)
    assert torch.equal(mask.any(2), weights_of(logits, pairs, k) > 0)
    assert bool((mask.sum(0) <= 1).all()), "two tokens at one place"
    filled = mask.any(0).int()  # (E, C): an expert's places are filled from the front
    assert torch.equal(filled.cummin(1).values, filled)
    chosen = logits.topk(k, dim=1).indices.flatten()
    assert counts.tolist() == torch.bincount(chosen, minlength=4).tolist()
    counted = k if gating is topkgating else 1
    wanted = balance_loss(logits, counted) if counted != 2 else _over_two(logits)
    torch.testing.assert_close(l_aux, wanted, rtol=1e-12, atol=0)


def _over_two(logits: torch.Tensor) -> torch.Tensor:
    share = torch.bincount(logits.topk(2, dim=1).indices.flatten(), minlength=4).double() / 26
    return (logits.softmax(1).mean(0) * share).sum() * 4


def test_gates_compute_in_fp32() -> None:
    combine = top1gating(_logits(torch.bfloat16), 1.0, 1)[1]
    assert isinstance(combine, torch.Tensor)
    assert combine.dtype == torch.float32


def test_sparse_routes_are_the_same_by_index() -> None:
    for gating, arguments in ((top1gating, {"use_rts": False}), (top2gating, {"top2_2nd_expert_sampling": False})):
        l_aux, combine, _, counts = gating(_logits(), 0.5, 1, **arguments)  # type: ignore[operator]
        sparse = gating(_logits(), 0.5, 1, sparse_routes=True, **arguments)  # type: ignore[operator]
        same_l_aux, capacity, experts, expert, place, weight, same_counts = sparse
        assert (capacity, experts) == (combine.shape[2], 4)
        assert torch.equal(same_l_aux, l_aux)
        assert torch.equal(same_counts, counts)
        rebuilt = torch.zeros_like(combine)
        for choice, token in (expert >= 0).nonzero().tolist():
            rebuilt[token, expert[choice, token], place[choice, token]] = weight[choice, token]
        assert torch.equal(rebuilt, combine)


def test_equal_seeds_draw_equal_tokens_and_other_seeds_others() -> None:
    logits = torch.zeros(64, 2)
    logits[:, 0] = 1.0
    kept = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        mask = top1gating(logits, 0.5, 1)[2]
        assert isinstance(mask, torch.Tensor)
        assert int(mask.sum()) == 16
        kept.append(mask.any(2)[:, 0].nonzero().flatten().tolist())
    assert kept[0] == kept[1] != kept[2]


def test_sampled_experts_follow_the_routers_probabilities() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(20_000, 3)
    counts = top1gating(logits, 1.0, 1, noisy_gate_policy="RSample", drop_tokens=False)[3]
    assert isinstance(counts, torch.Tensor)
    share = counts / 20_000
    # five standard deviations of a share: 5 * sqrt(0.25 / 20000)
    torch.testing.assert_close(share, torch.tensor([0.5, 0.3, 0.2]), rtol=0, atol=0.018)
    counts = top2gating(logits, 1.0, 1, drop_tokens=False)[3]
    assert isinstance(counts, torch.Tensor)
    # the first is always expert 0; of the rest the second is drawn, 0.3 against 0.2
    torch.testing.assert_close(counts / 20_000, torch.tensor([1.0, 0.6, 0.4]), rtol=0, atol=0.018)
