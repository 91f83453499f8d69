"""Experts spread over ranks: outputs and gradients are those of one process that has all experts, token after token."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.errors import ArgumentError
from deepspeed.moe.gating import capacity_of
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.topology import groups
from deepspeed.topology.mesh import ParallelMesh
from tests.support.plain_moe import plain_moe
from tests.support.ranks import run_ranks
from tests.support.sweeps import IS_SWEEP

WIDTH, EXPERTS = 6, 4


def _expert(number: int) -> nn.Sequential:
    """The expert of that number in the whole layer, the same wherever it is built."""
    torch.manual_seed(100 + number)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH)).double()


def _router() -> Tensor:
    return torch.randn(EXPERTS, WIDTH, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def _tokens(rank: int, tokens: int) -> Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _layer(ep_size: int, **arguments: Any) -> MoE:
    settings = {"use_rts": False, "top2_2nd_expert_sampling": False, "num_experts": EXPERTS, "min_capacity": 1, **arguments}
    layer = MoE(WIDTH, _expert(0), ep_size=ep_size, **settings).double()
    layer.set_deepspeed_parallelism()
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.copy_(_router())  # type: ignore[union-attr, operator]
    experts: Any = layer.deepspeed_moe.experts
    for name, expert in experts.deepspeed_experts.named_children():
        expert.load_state_dict(_expert(int(name)).state_dict())
    return layer


def _loss(output: Tensor, l_aux: Tensor, tokens: int) -> Tensor:
    return output.square().sum() / max(1, tokens) + l_aux


def _reference(counts: list[int], k: int, factor: float | None) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Outputs and gradients by rank, and the gradients of the mean loss by parameter name, all in this process."""
    experts = [_expert(number) for number in range(EXPERTS)]
    router = _router().requires_grad_()
    inputs = [_tokens(rank, count).requires_grad_() for rank, count in enumerate(counts)]
    outputs, losses = [], []
    for hidden, count in zip(inputs, counts, strict=True):
        capacity = None if factor is None else capacity_of(torch.empty(count, EXPERTS), factor, 1, k)
        output, l_aux = plain_moe(hidden, router, experts, k, capacity)
        outputs.append(output.detach())
        losses.append(_loss(output, l_aux, count))
    torch.stack(losses).mean().backward()
    gradients = {"deepspeed_moe.gate.wg.weight": router.grad}
    for number, expert in enumerate(experts):
        for name, param in expert.named_parameters():
            gradient = torch.zeros_like(param) if param.grad is None else param.grad
            gradients[f"deepspeed_moe.experts.deepspeed_experts.{number}.{name}"] = gradient
    of_inputs = [torch.zeros_like(each) if each.grad is None else each.grad * len(counts) for each in inputs]
    return outputs, of_inputs, {name: each for name, each in gradients.items() if each is not None}


def _compare(rank: int, world_size: int, ep_size: int, k: int, factor: float | None, counts: list[int]) -> set[str]:
    layer = _layer(ep_size, k=k, drop_tokens=factor is not None, capacity_factor=factor or 1.0)
    hidden = _tokens(rank, counts[rank]).requires_grad_()
    output, l_aux, _ = layer(hidden)
    _loss(output, l_aux, counts[rank]).backward()
    outputs, of_inputs, gradients = _reference(counts, k, factor)
    bounds = {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(output, outputs[rank], **bounds)
    torch.testing.assert_close(hidden.grad, of_inputs[rank], **bounds)
    mesh = groups.get_current() if ep_size > 1 else ParallelMesh.build()
    for name, param in layer.named_parameters():
        assert param.grad is not None, name
        is_spread = is_moe_param(param) and ep_size > 1
        axis = mesh.expert_data_parallel if is_spread else mesh.data_parallel
        comm.all_reduce(param.grad, group=axis.group)  # what every reducer takes: the mean over those who hold the same
        torch.testing.assert_close(param.grad / axis.size, gradients[name], **bounds)
    return {name for name, param in layer.named_parameters() if is_moe_param(param)}


CASES = [
    (ranks, ep_size, k, factor)
    for ranks, ep_size in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (3, 1))
    for k, factor in itertools.product((1, 2, 3), (None, 0.5, 1.25))
]


SOME = [(2, 2, 1, 0.5), (2, 2, 2, None), (2, 1, 2, 0.5), (4, 2, 2, 0.5), (4, 2, 3, 1.25), (4, 4, 3, None)]


@pytest.mark.parametrize(("ranks", "ep_size", "k", "factor"), CASES if IS_SWEEP else SOME)
def test_outputs_and_gradients_equal_one_process(ranks: int, ep_size: int, k: int, factor: float | None) -> None:
    for counts in ([9] * ranks, [7, 0, 2, 12][:ranks]):
        names = run_ranks(_compare, ranks, ep_size, k, factor, counts)
        held = EXPERTS // ep_size
        for rank, mine in enumerate(names):
            first = rank % ep_size * held
            assert {name.split(".")[3] for name in mine} == {str(first + place) for place in range(held)}


def _sixteen_bits(rank: int, world_size: int) -> None:
    layer = _layer(2, drop_tokens=False).bfloat16()
    hidden = _tokens(rank, 5).bfloat16().requires_grad_()
    output, l_aux, _ = layer(hidden)
    (output.float().sum() + l_aux).backward()
    twin = [_expert(number).bfloat16() for number in range(EXPERTS)]
    wanted, _ = plain_moe(hidden.detach(), _router().bfloat16(), twin, 1, None)
    torch.testing.assert_close(output, wanted, rtol=0.05, atol=0.02)  # weights of the reference are rounded to bf16 earlier
    assert hidden.grad is not None


def test_rows_of_sixteen_bits_travel() -> None:
    run_ranks(_sixteen_bits, 2)


def _frozen_input(rank: int, world_size: int) -> None:
    layer = _layer(2, k=2)
    output, l_aux, _ = layer(_tokens(rank, 4))  # an input without a gradient: backward stops at the experts
    (output.sum() + l_aux).backward()
    assert all(param.grad is not None for param in layer.parameters())
    with torch.no_grad():
        layer(_tokens(rank, 3))


def test_an_input_without_a_gradient_is_enough() -> None:
    run_ranks(_frozen_input, 2)


def _mesh(rank: int, world_size: int) -> None:
    mesh = ParallelMesh.build(expert=2)
    groups.set_current(mesh)
    early = MoE(WIDTH, _expert(0), num_experts=EXPERTS, ep_size=2)
    names = {name for name, _ in early.deepspeed_moe.experts.deepspeed_experts.named_children()}  # type: ignore[union-attr]
    assert names == {str(rank % 2 * 2), str(rank % 2 * 2 + 1)}, "they are known where the mesh is"
    first, second = _layer(2), _layer(2)
    assert groups.get_current() is mesh, "the current mesh has such an axis"
    assert first.deepspeed_moe.ep_group is second.deepspeed_moe.ep_group is mesh.axis("expert").group
    _layer(4)
    assert groups.get_current().sizes["expert"] == 4
    with pytest.raises(ArgumentError, match=r"3 ranks \(ep_size\) do not divide the 4 data-parallel"):
        _layer(3, num_experts=3)
    apart = MoE(WIDTH, _expert(0), num_experts=2, ep_size=2)
    apart.set_deepspeed_parallelism(use_data_before_expert_parallel_=True)
    assert groups.get_current().axis("expert").ranks == (rank % 2, rank % 2 + 2)
    groups.set_current(ParallelMesh.build(tensor=2))
    _layer(2)
    assert groups.get_current().axis("tensor").ranks == (rank // 2 * 2, rank // 2 * 2 + 1), "other axes stay"
    assert groups.get_current().axis("expert").ranks == (rank % 2, rank % 2 + 2)


def test_layers_share_the_current_mesh_or_build_theirs() -> None:
    run_ranks(_mesh, 4)


def _case_080(rank: int, world_size: int) -> None:
    for k, drops, tokens in itertools.product((1, 2), (True, False), (1, 2, 5)):
        torch.manual_seed(0)
        layer = MoE(
            8,
            nn.Linear(8, 8),
            num_experts=4,
            ep_size=2,
            k=k,
            capacity_factor=8.0,
            min_capacity=1,
            drop_tokens=drops,
            use_rts=False,
        )
        layer.set_deepspeed_parallelism()
        output, l_aux, counts = layer(torch.randn(1, tokens, 8))
        assert output.shape == (1, tokens, 8)
        assert bool(output.isfinite().all())
        assert bool(l_aux.isfinite())
        assert int(counts.sum()) == tokens * k
        assert bool((output.abs().sum(-1) > 0).all()), "the capacity was ample"


def test_fewer_tokens_than_experts_are_all_kept_where_there_is_room() -> None:
    run_ranks(_case_080, 2)
