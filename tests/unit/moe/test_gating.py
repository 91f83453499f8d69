from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepspeed.errors import ArgumentError
from deepspeed.moe.gating import Routing, capacity_of, pairs_of, route_first, route_first_two, route_k, z_loss_of
from tests.support.plain_moe import balance_loss, kept_pairs, weights_of

SHAPES = st.tuples(st.integers(0, 25), st.integers(1, 7))
CAPACITIES = st.one_of(st.none(), st.integers(0, 12))


def _logits(tokens: int, experts: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + tokens * 10 + experts)
    return torch.randn(tokens, experts, generator=generator, dtype=torch.float64)


def _rows(routing: Routing) -> list[tuple[int, int, float]]:
    """(token, expert, weight) of each row, sorted; the row's expert is told by its stretch."""
    tokens = routing.expert_KT.shape[1]
    rows = int(routing.kept_E.sum())
    pairs = routing.pair_P[:rows].tolist()
    experts = torch.repeat_interleave(torch.arange(routing.kept_E.numel()), routing.kept_E).tolist()
    weights = routing.weight_KT.flatten().tolist()
    chosen = routing.expert_KT.flatten().tolist()
    assert [chosen[pair] for pair in pairs] == experts
    slots = routing.slot_KT.flatten().tolist()
    assert [slots[pair] for pair in pairs] == list(range(rows))
    gone = set(range(len(slots))) - set(pairs)
    assert all(slots[pair] == len(slots) and weights[pair] == 0 for pair in gone)
    return sorted((pair % tokens, expert, weights[pair]) for pair, expert in zip(pairs, experts, strict=True))


def _route(logits: Tensor, k: int, capacity: int | None, **others: Any) -> Routing:
    if k == 1:
        return route_first(logits, capacity, **others)
    return route_first_two(logits, capacity, **others) if k == 2 else route_k(logits, k, capacity, **others)


def _expected(logits: Tensor, k: int, capacity: int | None, policy: str = "") -> list[tuple[int, int, float]]:
    pairs = kept_pairs(logits, k, capacity, policy)
    weights = weights_of(logits, pairs, k)
    return [(token, expert, float(weights[token, expert])) for token, expert in pairs]


def _equal(got: list[tuple[int, int, float]], wanted: list[tuple[int, int, float]]) -> bool:
    return [row[:2] for row in got] == [row[:2] for row in wanted] and all(
        math.isclose(one[2], two[2], rel_tol=1e-12) for one, two in zip(got, wanted, strict=True)
    )


@settings(deadline=None)
@given(shape=SHAPES, k=st.integers(1, 4), capacity=CAPACITIES, seed=st.integers(0, 50))
def test_routing_is_that_of_the_papers(shape: tuple[int, int], k: int, capacity: int | None, seed: int) -> None:
    logits = _logits(*shape, seed)
    if k > shape[1]:
        return
    routing = _route(logits, k, capacity)
    assert _equal(_rows(routing), _expected(logits, k, capacity))
    torch.testing.assert_close(routing.l_aux, balance_loss(logits, k), rtol=1e-12, atol=0)


@settings(deadline=None)
@given(shape=SHAPES, k=st.integers(1, 4), capacity=CAPACITIES)
def test_by_position_a_full_expert_keeps_the_first_tokens(shape: tuple[int, int], k: int, capacity: int | None) -> None:
    if k > shape[1]:
        return
    logits = _logits(*shape)
    rows = _rows(route_k(logits, k, capacity, drop_policy="position"))
    pairs = kept_pairs(logits, k, capacity, "position")
    weights = weights_of(logits, pairs, max(2, k))
    assert _equal(rows, [(token, expert, float(weights[token, expert])) for token, expert in pairs])


@settings(deadline=None)
@given(shape=SHAPES, k=st.integers(1, 4), capacity=CAPACITIES)
def test_counts_capacities_and_weights_hold_their_bounds(shape: tuple[int, int], k: int, capacity: int | None) -> None:
    tokens, experts = shape
    if k > experts:
        return
    routing = _route(_logits(*shape), k, capacity)
    assert int(routing.exp_counts.sum()) == tokens * k
    limit = tokens if capacity is None else capacity
    assert torch.equal(routing.kept_E, routing.exp_counts.clamp(max=limit))
    total_T = routing.weight_KT.sum(0)
    if k == 1:
        assert bool((total_T < 1 + 1e-12).all())
    else:
        is_kept_T = (routing.slot_KT < routing.slot_KT.numel()).any(0)
        torch.testing.assert_close(total_T, is_kept_T.to(total_T.dtype), rtol=1e-12, atol=0)
    assert torch.isfinite(routing.l_aux)
    facts = routing.facts
    dropped = tokens * k - int(routing.kept_E.sum())
    assert math.isclose(float(facts.dropped_share()), dropped / max(1, tokens * k), rel_tol=1e-6)
    assert 0 <= float(facts.entropy()) <= math.log(experts) + 1e-9


@given(
    shape=st.tuples(st.integers(1, 99), st.integers(1, 16)),
    factor=st.floats(0.1, 8),
    least=st.integers(0, 9),
    k=st.integers(1, 4),
)
def test_capacity_is_the_papers_bound(shape: tuple[int, int], factor: float, least: int, k: int) -> None:
    capacity = capacity_of(torch.empty(shape), factor, least, k)
    assert capacity >= least
    assert capacity == least or -1e-9 < capacity - shape[0] / shape[1] * factor * k < 1 + 1e-9


@pytest.mark.parametrize(("tokens", "factor", "k", "wanted"), [(400, 1.1, 1, 110), (12, 1.1, 1, 4), (400, 1.1, 2, 220)])
def test_rounding_of_the_product_gives_no_expert_a_row_more(tokens: int, factor: float, k: int, wanted: int) -> None:
    assert capacity_of(torch.empty(tokens, 4), factor, 0, k) == wanted


@pytest.mark.parametrize("k", [1, 2, 3])
def test_counts_are_the_callers_to_change(k: int) -> None:
    routing = _route(_logits(8, 4), k, None)
    routing.exp_counts.zero_()
    assert int(routing.kept_E.sum()) == int(routing.facts.routed_E.sum()) == 8 * k


def test_tokens_not_in_use_go_nowhere() -> None:
    logits = _logits(6, 3)
    used = torch.tensor([1, 0, 1, 1, 0, 1])
    for k in (1, 2, 3):
        routing = _route(logits, k, 1, used_T=used)
        assert {row[0] for row in _rows(routing)} <= {0, 2, 3, 5}
        assert int(routing.exp_counts.sum()) == 4 * k
        whole = _route(logits, k, None, used_T=used)
        assert {row[0] for row in _rows(whole)} == {0, 2, 3, 5}
        assert int(whole.kept_E.sum()) == 4 * k
    with pytest.raises(ArgumentError, match="5 elements, there are 6 tokens"):
        route_first(logits, 1, used_T=used[1:])


def test_random_token_selection_keeps_those_with_the_largest_numbers() -> None:
    logits = torch.tensor([[9.0, 0.0]] * 5)
    picks = torch.tensor([[0.1, 9], [0.5, 9], [0.3, 9], [0.9, 9], [0.2, 9]])
    assert [row[0] for row in _rows(route_first(logits, 2, picks_TE=picks))] == [1, 3]


def test_noise_changes_the_choice_and_not_the_weights() -> None:
    logits, noise = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[-9.0, -9.0, 9.0]])
    probabilities = logits.softmax(1)[0].tolist()
    ((_, expert, weight),) = _rows(route_first(logits, None, noise_TE=noise))
    assert (expert, weight) == (2, probabilities[2])
    first, second = _rows(route_first_two(logits, None, noise_TE=noise))
    assert [first[1], second[1]] == [0, 2]
    assert math.isclose(first[2], probabilities[0] / (probabilities[0] + probabilities[2]), rel_tol=1e-6)


def test_with_dropped_choices_the_rest_weighs_one() -> None:
    logits = torch.tensor([[3.0, 2.0, 0.0], [3.0, 2.0, 0.0]])
    routing = route_first_two(logits, 1)
    assert _rows(routing)[0][0] == 0
    torch.testing.assert_close(routing.weight_KT.sum(0), torch.tensor([1.0, 0.0]))


def test_the_losses_reach_the_router_and_the_counts_do_not() -> None:
    logits = _logits(8, 4).requires_grad_()
    for k in (1, 2, 3):
        (gradient,) = torch.autograd.grad(_route(logits, k, 2).l_aux, logits)
        (wanted,) = torch.autograd.grad(balance_loss(logits, k), logits)
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-15)
    assert not _route(logits, 2, 2).facts.probabilities_TE.requires_grad
    torch.testing.assert_close(z_loss_of(logits), (logits.exp().sum(1).log() ** 2).mean(), rtol=1e-12, atol=0)
    assert float(z_loss_of(logits[:0]).detach()) == 0


def test_impossible_settings_are_refused() -> None:
    for k in (0, 4):
        with pytest.raises(ArgumentError, match=f"k={k} of 3 experts"):
            route_k(_logits(2, 3), k, None)
    with pytest.raises(ArgumentError, match="'probs'"):
        route_k(_logits(2, 3), 2, 1, drop_policy="none")  # type: ignore[arg-type]


def test_pairs_are_sorted_by_expert_and_those_that_go_nowhere_are_last() -> None:
    expert_TK = torch.tensor([[2, 0], [0, 3], [1, 2]])  # of 3 experts: 3 is nowhere
    pairs = pairs_of(expert_TK, 3)
    assert pairs.kept_E.tolist() == [2, 1, 2]
    assert pairs.pair_P.tolist() == [1, 3, 2, 0, 5, 4]  # pair p is choice p // 3 of token p % 3
    assert pairs.slot_KT.tolist() == [[3, 0, 2], [1, 5, 4]]
    assert pairs_of(expert_TK[:0], 3).kept_E.tolist() == [0, 0, 0]
