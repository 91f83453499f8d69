from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepspeed.moe.dispatch import Ways, from_rows, to_rows
from deepspeed.moe.gating import Routing, route_first, route_first_two, route_k

TOKENS, WIDTH = 7, 3


def _routing(k: int, capacity: int | None) -> Routing:
    logits = torch.randn(TOKENS, 4, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    if k == 1:
        return route_first(logits, capacity)
    return route_first_two(logits, capacity) if k == 2 else route_k(logits, k, capacity)


def _ways(routing: Routing, factor: int = 1) -> Ways:
    return Ways(routing, int(routing.kept_E.sum()), gradient_factor=factor)


@pytest.mark.parametrize("capacity", [None, 2, 0])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_there_and_back_is_each_token_times_its_weights(k: int, capacity: int | None) -> None:
    routing = _routing(k, capacity)
    ways = _ways(routing)
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    rows = to_rows(hidden, ways)
    assert rows.shape == (int(routing.kept_E.sum()), WIDTH)
    back = from_rows(rows, routing.weight_KT, ways)
    torch.testing.assert_close(back, hidden * routing.weight_KT.sum(0)[:, None], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("capacity", [None, 2])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_gradients_are_those_of_finite_differences(k: int, capacity: int | None) -> None:
    routing = _routing(k, capacity)
    ways = _ways(routing)
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = (torch.rand(k, TOKENS, dtype=torch.float64) * (routing.slot_KT < k * TOKENS)).requires_grad_()
    rows = torch.randn(ways.rows, WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: to_rows(x, ways), (hidden,))
    assert torch.autograd.gradcheck(lambda x: from_rows(x, weight.detach(), ways), (rows,))

    def of_kept(x: Tensor) -> Tensor:  # weights of dropped pairs get no gradient, whatever a difference would say
        return from_rows(rows.detach(), x * (routing.slot_KT < k * TOKENS), ways)

    assert torch.autograd.gradcheck(of_kept, (weight,))


def test_the_factor_divides_on_the_way_in_and_multiplies_on_the_way_out() -> None:
    routing = _routing(2, 2)
    gradients = []
    for factor in (1, 4):
        ways = _ways(routing, factor)
        hidden = torch.ones(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
        rows = to_rows(hidden, ways)
        rows.retain_grad()
        weight = routing.weight_KT.detach().requires_grad_()
        from_rows(rows, weight, ways).sum().backward()
        assert rows.grad is not None
        gradients.append((rows.grad, hidden.grad, weight.grad))
    (rows_1, hidden_1, weight_1), (rows_4, hidden_4, weight_4) = gradients
    assert torch.equal(rows_1, rows_4 * 4)
    assert hidden_1 is not None
    torch.testing.assert_close(hidden_1, hidden_4, rtol=0, atol=0)
    assert torch.equal(weight_1, weight_4)


def test_a_gradient_of_any_layout_is_taken() -> None:
    ways = _ways(_routing(2, None))
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    to_rows(hidden, ways).sum().backward()  # an expanded scalar
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, torch.full_like(hidden, 2))
