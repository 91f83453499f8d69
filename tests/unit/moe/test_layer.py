from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.errors import ArgumentError, CommError, UsageError
from deepspeed.moe.gate import TopKGate
from deepspeed.moe.gating import capacity_of
from deepspeed.moe.layer import MoE, MOELayer
from deepspeed.moe.utils import has_moe_layers
from deepspeed.topology import groups
from deepspeed.topology.mesh import AxisGroup
from tests.support.plain_moe import plain_moe

WIDTH, EXPERTS = 6, 4


def _expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH))


def _moe(dtype: torch.dtype = torch.float64, **arguments: Any) -> MoE:
    torch.manual_seed(1)
    settings = {"use_rts": False, "top2_2nd_expert_sampling": False, "num_experts": EXPERTS, **arguments}
    layer = MoE(WIDTH, _expert(), **settings).to(dtype)
    for param in layer.parameters():
        nn.init.normal_(param, std=0.5)
    return layer


def _plain(layer: MoE, hidden: Tensor, capacity: int | None) -> tuple[Tensor, Tensor]:
    gate = layer.deepspeed_moe.gate
    assert isinstance(gate, TopKGate)
    experts: Any = layer.deepspeed_moe.experts
    output, l_aux = plain_moe(hidden.reshape(-1, WIDTH), gate.wg.weight, list(experts.deepspeed_experts), gate.k, capacity)
    return output.view_as(hidden), l_aux


@pytest.mark.parametrize("tokens", [0, 1, 3, 17])
@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_output_and_gradients_are_those_of_single_tokens(k: int, drops: bool, tokens: int) -> None:
    layer = _moe(k=k, drop_tokens=drops, capacity_factor=0.6, min_capacity=1)
    other = copy.deepcopy(layer)
    hidden = torch.randn(1, tokens, WIDTH, dtype=torch.float64, requires_grad=True)
    same = hidden.detach().clone().requires_grad_()
    output, l_aux, counts = layer(hidden)
    capacity = capacity_of(torch.empty(tokens, EXPERTS), 0.6, 1, k) if drops else None
    wanted, wanted_l_aux = _plain(other, same, capacity)
    assert output.shape == hidden.shape
    assert int(counts.sum()) == tokens * k
    torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(l_aux, wanted_l_aux, rtol=1e-12, atol=1e-13)
    for result, loss in ((output, l_aux), (wanted, wanted_l_aux)):
        (result.square().sum() + loss).backward()
    torch.testing.assert_close(hidden.grad, same.grad, rtol=1e-12, atol=1e-13)
    for (name, param), twin in zip(layer.named_parameters(), other.parameters(), strict=True):
        assert param.grad is not None, f"{name}: every expert takes part, with tokens or without"
        torch.testing.assert_close(
            param.grad, torch.zeros_like(twin) if twin.grad is None else twin.grad, rtol=1e-12, atol=1e-13
        )


def test_a_token_not_in_use_comes_back_as_zeros() -> None:
    layer = _moe(k=2)
    hidden = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    used = torch.tensor([[1, 1, 0], [1, 0, 1]])
    output, _, counts = layer(hidden, used)
    assert int(counts.sum()) == 8
    assert torch.equal((output != 0).all(-1), used.bool())
    with pytest.raises(ArgumentError, match="2 elements, there are 6 tokens"):
        layer(hidden, torch.ones(2))


def test_the_residual_form_mixes_with_a_dense_expert() -> None:
    layer = _moe(use_residual=True, drop_tokens=False)
    hidden = torch.randn(5, WIDTH, dtype=torch.float64)
    share = layer.coefficient(hidden).softmax(-1)
    wanted = _plain(layer, hidden, None)[0] * share[:, :1] + layer.mlp(hidden) * share[:, 1:]
    torch.testing.assert_close(layer(hidden)[0], wanted, rtol=1e-12, atol=1e-13)
    assert {"mlp.0.weight", "coefficient.weight"} <= {name for name, _ in layer.named_parameters()}
    assert not hasattr(layer.mlp[0].weight, "group_name"), "the dense expert is no expert to ZeRO"  # type: ignore[index]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_sixteen_bits_the_router_computes_in_fp32(dtype: torch.dtype) -> None:
    layer = _moe(dtype, k=2)
    hidden = torch.randn(64, WIDTH, dtype=dtype, requires_grad=True)
    output, l_aux, counts = layer(hidden)
    assert (output.dtype, l_aux.dtype) == (dtype, torch.float32)
    twin = copy.deepcopy(layer).float()
    assert torch.equal(counts, twin(hidden.detach().float())[2])
    (output.float().square().mean() + l_aux).backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == dtype


def test_under_autocast_the_router_computes_in_fp32() -> None:
    layer = _moe(torch.float32, k=2)
    hidden = torch.randn(64, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        output, l_aux, counts = layer(hidden)
    assert (output.dtype, l_aux.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(counts, layer(hidden)[2])


def test_the_router_is_fp32_whatever_the_default() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        gate = TopKGate(WIDTH, EXPERTS)
    finally:
        torch.set_default_dtype(torch.float32)
    assert gate.wg.weight.dtype == torch.float32


def test_the_z_loss_joins_the_balancing_loss_with_its_weight() -> None:
    hidden = torch.randn(9, WIDTH, dtype=torch.float64)
    without, with_it = _moe(), _moe(z_loss_weight=0.5)
    logits = hidden @ without.deepspeed_moe.gate.wg.weight.T  # type: ignore[union-attr, operator]
    wanted = without(hidden)[1] + 0.5 * logits.exp().sum(1).log().square().mean()
    torch.testing.assert_close(with_it(hidden)[1], wanted, rtol=1e-12, atol=0)


def test_eval_draws_nothing_and_has_its_own_capacity() -> None:
    arguments = {"num_experts": 2, "capacity_factor": 0.1, "eval_capacity_factor": 2.0, "min_capacity": 1, "use_rts": True}
    for k, noise in ((1, "RSample"), (1, "Jitter"), (2, None)):
        layer = _moe(torch.float32, k=k, noisy_gate_policy=noise, top2_2nd_expert_sampling=True, **arguments)
        hidden = torch.randn(64, WIDTH)
        gate: Any = layer.deepspeed_moe.gate
        layer(hidden)
        assert float(gate.last_facts.dropped_share()) > 0.5
        layer.eval()
        first, second = layer(hidden)[0], layer(hidden)[0]
        assert torch.equal(first, second)
        assert float(gate.last_facts.dropped_share()) == 0


def test_noise_is_drawn_while_training() -> None:
    hidden = torch.randn(64, WIDTH)
    for arguments in (
        {"noisy_gate_policy": "Jitter"},
        {"noisy_gate_policy": "RSample"},
        {"k": 2, "top2_2nd_expert_sampling": True},
    ):
        layer = _moe(torch.float32, **arguments)
        assert not torch.equal(layer(hidden)[0], layer(hidden)[0]), arguments


def test_a_layer_can_be_copied_after_its_forward() -> None:
    layer = _moe()
    hidden = torch.randn(8, WIDTH, dtype=torch.float64)
    output, l_aux, _ = layer(hidden)
    assert layer.deepspeed_moe.l_aux is l_aux
    assert torch.equal(copy.deepcopy(layer)(hidden)[0], output)


def test_a_placed_layer_is_copied_with_its_ranks_and_not_pickled() -> None:
    layer = _moe(ep_size=2)
    layer.deepspeed_moe.set_expert_axis(AxisGroup([0, 1], 1))
    assert copy.deepcopy(layer).deepspeed_moe.expert_ranks == (0, 1)
    with pytest.raises(UsageError, match=r"Save engine\.save_checkpoint\(\) or its state_dict\(\)"):
        pickle.dumps(layer)
    alone = _moe()
    hidden = torch.randn(3, WIDTH, dtype=torch.float64)
    alone.eval()
    assert torch.equal(pickle.loads(pickle.dumps(alone))(hidden)[0], alone(hidden)[0])


def test_names_and_counts_of_a_layer() -> None:
    layer = _moe(use_residual=False)
    names = [name for name, _ in layer.named_parameters()]
    assert names[0] == "deepspeed_moe.gate.wg.weight"
    assert names[1] == "deepspeed_moe.experts.deepspeed_experts.0.0.weight"
    assert has_moe_layers(nn.Sequential(layer, nn.Linear(2, 2))) == (True, EXPERTS)
    assert has_moe_layers(nn.Linear(2, 2)) == (False, 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_experts": 3, "ep_size": 2}, "num_experts=3 over ep_size=2.*divides num_experts"),
        ({"num_experts": 0}, "num_experts=0"),
        ({"num_experts": 2, "k": 3}, "k=3 of num_experts=2.*Lower k"),
        ({"noisy_gate_policy": "gauss"}, '\'gauss\'.*"Jitter" or "RSample"'),
    ],
    ids=str,
)
def test_impossible_arguments_are_assertion_errors_with_a_cure(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text) as caught:
        MoE(WIDTH, _expert(), **arguments)
    assert isinstance(caught.value, AssertionError)


def test_spread_experts_need_to_be_told_where() -> None:
    layer = _moe(ep_size=2)
    assert isinstance(layer.deepspeed_moe, MOELayer)
    assert layer.deepspeed_moe.ep_group is None
    with pytest.raises(UsageError, match="set_deepspeed_parallelism"):
        layer(torch.ones(2, WIDTH, dtype=torch.float64))
    with pytest.raises(CommError):
        layer.set_deepspeed_parallelism()


def test_loaded_experts_do_not_change_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(*ranks: int) -> None:
        mesh = SimpleNamespace(sizes={"expert": 2, "tensor": 1}, axis=lambda name: AxisGroup(ranks, 2))
        monkeypatch.setattr(groups, "get_current", lambda: mesh)

    whole = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=4).state_dict()
    monkeypatch.setattr(groups, "has_current", lambda: True)
    use(2, 3)
    layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=4, ep_size=2)
    use(0, 2)
    layer.set_deepspeed_parallelism()  # nothing was loaded
    layer.load_state_dict(whole)
    layer.set_deepspeed_parallelism()
    use(2, 3)
    with pytest.raises(UsageError, match=r"over ranks \(0, 2\); now these are \(2, 3\).*after deepspeed\.initialize"):
        layer.set_deepspeed_parallelism()


def test_one_rank_needs_no_process_group() -> None:
    layer = _moe()
    layer.set_deepspeed_parallelism()
    assert layer(torch.ones(2, WIDTH, dtype=torch.float64))[0].shape == (2, WIDTH)


def test_infinite_rows_of_one_token_do_not_reach_dropped_ones() -> None:
    layer = _moe(num_experts=1, capacity_factor=0.5, min_capacity=1)
    hidden = torch.randn(4, WIDTH, dtype=torch.float64)
    hidden[1] = float("inf")
    output = layer(hidden)[0]
    assert torch.equal(output[2:], torch.zeros(2, WIDTH, dtype=torch.float64))
    assert bool(output[0].isfinite().all())
