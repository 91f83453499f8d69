"""Rules for stacked experts, what they refuse, reading and setting their parts. They train in `test_tensor_parallel`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.config.parallel import TensorParallelConfig
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.module_inject.layers import GatherReplacedLayerParams
from deepspeed.tensor_parallel.auto import apply_auto_tp
from deepspeed.tensor_parallel.experts import StackedExperts
from deepspeed.topology.mesh import AxisGroup
from tests.ranks.test_tensor_parallel import ROUNDING, compare, tensor_axis
from tests.ranks.test_tensor_parallel_rules import settings, spec
from tests.support.cut_net import cuts_of
from tests.support.families import build, double_throughout, logits_of, tokens
from tests.support.ranks import run_ranks

FIRST, LAST = r"experts\.gate_up_proj", r"experts\.down_proj"


def _rule(pattern: str, kind: str, **keys: Any) -> dict[str, Any]:
    return {"patterns": [rf"{pattern}$"], "partition_type": kind, **keys}


def _experts(model: nn.Module) -> list[StackedExperts]:
    return [each for each in model.modules() if isinstance(each, StackedExperts)]


def _rules(rank: int, world_size: int) -> None:
    axis = tensor_axis(world_size)
    ids = tokens()
    for specs, more, layers, others in [
        ([_rule(FIRST, "column"), _rule(LAST, "row")], {}, 2, 0),  # as parameters are named
        ([spec(FIRST, "column"), spec(LAST, "row")], {}, 2, 0),  # as if they were weights of layers
        ([_rule(f"{FIRST}|{LAST}", "skip")], {"use_default_specs": True}, 0, 10),
    ]:
        with double_throughout("mixtral"):
            whole = build("mixtral")
            cut = copy.deepcopy(whole)
            apply_auto_tp(cut, settings(world_size, specs, rules=more), axis)
            assert len(_experts(cut)) == layers
            assert len(cuts_of(cut)) == 2 * layers + others
            torch.testing.assert_close(logits_of(cut, ids), logits_of(whole, ids), rtol=ROUNDING, atol=ROUNDING)


def test_rules_say_whether_experts_are_cut() -> None:
    run_ranks(_rules, 2, init=False)


_REFUSED = [
    ([_rule(FIRST, "column")], r"of the experts '.*experts', rules cut '.*gate_up_proj' and leave '.*down_proj' whole"),
    ([_rule(LAST, "row")], r"leave '.*gate_up_proj' whole. They go together"),
    (
        [_rule(FIRST, "row"), _rule(LAST, "row")],
        r"partition_type='row' for '.*gate_up_proj' of stacked experts.*'column' for",
    ),
    ([_rule(FIRST, "column", shape=[2, -1])], r"shape, partition_dim or gather_output for .*gate_up_proj.*Leave them out"),
    ([_rule(FIRST, "column", gather_output=True)], r"gather_output for '.*gate_up_proj' of stacked experts"),
]


class Normed(nn.Module):
    """Like stacked experts to look at; what follows their sum is no sum."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.act_fn = 2, nn.SiLU()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.randn(2, 8, 3)), nn.Parameter(torch.randn(2, 3, 4))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows = []
        for token, (index, weight) in enumerate(zip(top_k_index, top_k_weights, strict=True)):
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[index[0]]).chunk(2, -1)
            rows.append(weight[0] * F.normalize(F.linear(self.act_fn(gate) * up, self.down_proj[index[0]]), dim=-1))
        return torch.stack(rows)


def _refused(rank: int, world_size: int) -> None:
    axis = tensor_axis(world_size)
    for specs, message in _REFUSED:
        with pytest.raises(ArgumentError, match=message):
            apply_auto_tp(build("mixtral"), settings(world_size, specs), axis)
    block = nn.Module()
    block.experts = Normed()
    with pytest.raises(UsageError, match=r"Normed \('experts'\).*do not add up.*'skip' for 'gate_up_proj\|down_proj'"):
        apply_auto_tp(block, TensorParallelConfig(autotp_size=world_size), axis)


def test_what_does_not_fit_experts_is_refused_with_a_cure() -> None:
    run_ranks(_refused, 2, init=False)


def _state(rank: int, world_size: int) -> None:
    axis = tensor_axis(world_size)
    for family in ("mixtral_odd", "gpt_oss"):
        whole = build(family)
        cut, other = copy.deepcopy(whole), copy.deepcopy(whole)
        apply_auto_tp(cut, TensorParallelConfig(autotp_size=world_size), axis)
        with torch.no_grad():
            for param in other.parameters():
                param.add_(1)
        cut.load_state_dict(other.state_dict())
        compare(other, cut, rank, "weight")
        _set_whole(cut, other)
        with torch.no_grad(), double_throughout(family):  # one bias, also where no graph is made
            torch.testing.assert_close(logits_of(cut, tokens()), logits_of(other, tokens()), rtol=ROUNDING, atol=ROUNDING)


def _set_whole(cut: nn.Module, other: nn.Module) -> None:
    for name, module in cut.named_modules():
        if isinstance(module, StackedExperts):
            with GatherReplacedLayerParams(list(module.parameters()), module):
                assert torch.equal(module.down_proj, other.get_submodule(name).down_proj)
                assert module.gate_up_proj.shape == other.get_submodule(name).gate_up_proj.shape


def test_parts_of_experts_come_from_whole_tensors_and_become_whole() -> None:
    run_ranks(_state, 2, init=False)


class Routed(nn.Module):
    """Expert MLPs in a list, of which the block's own code chooses one per token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Module() for _ in range(3))
        for expert in self.experts:
            expert.w1, expert.w2, expert.w3 = nn.Linear(6, 5, False), nn.Linear(5, 6, False), nn.Linear(6, 5, False)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if rows.numel():
                inner = F.silu(expert.w1(x[rows])) * expert.w3(x[rows])
                out = out.index_add(0, rows, weights[rows, None] * expert.w2(inner))
        return out


def _listed(rank: int, world_size: int) -> None:
    axis: AxisGroup = tensor_axis(world_size)
    torch.manual_seed(2)
    whole = Routed().double()
    cut = copy.deepcopy(whole)
    apply_auto_tp(cut, TensorParallelConfig(autotp_size=world_size), axis)
    assert len(cuts_of(cut)) == 9
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (whole, cut)]
    for step in range(10):
        x = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        losses = [model(x).pow(2).sum() for model in (whole, cut)]
        torch.testing.assert_close(losses[1], losses[0], rtol=ROUNDING, atol=ROUNDING)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    compare(whole, cut, rank, "weight")


@pytest.mark.parametrize("size", [2, 4])
def test_lists_of_experts_train_as_one_process_does(size: int) -> None:
    run_ranks(_listed, size, init=False)
