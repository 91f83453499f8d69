from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.errors import ArgumentError
from deepspeed.moe.experts import Experts, expert_group_name


def test_parameters_say_that_they_are_experts_and_of_which_ranks() -> None:
    experts = Experts(nn.Linear(4, 4), 2, expert_group_name(4))
    assert {(p.allreduce, p.group_name) for p in experts.parameters()} == {(False, "ep_size_4")}  # type: ignore[attr-defined]
    alone = Experts(nn.Linear(4, 4))
    assert {(p.allreduce, p.group_name) for p in alone.parameters()} == {(False, None)}  # type: ignore[attr-defined]


def test_experts_are_copies_with_equal_values_and_nothing_shared() -> None:
    expert = nn.Linear(4, 4)
    experts = Experts(expert, 2)
    first, second = experts.deepspeed_experts
    assert torch.equal(first.weight, expert.weight)  # type: ignore[arg-type]
    with torch.no_grad():
        first.weight.zero_()  # type: ignore[union-attr, operator]
    assert not torch.equal(first.weight, second.weight)  # type: ignore[arg-type]
    assert not torch.equal(first.weight, expert.weight)  # type: ignore[arg-type]


def test_names_are_global_and_indices_local() -> None:
    experts = Experts(nn.Linear(4, 4, bias=False), 2)
    before = list(experts.deepspeed_experts)
    experts.place(3)
    assert [name for name, _ in experts.named_parameters()] == ["deepspeed_experts.6.weight", "deepspeed_experts.7.weight"]
    assert len(experts.deepspeed_experts) == 2
    assert experts.deepspeed_experts[0] is before[0]
    assert experts.deepspeed_experts[-1] is before[1]
    assert [*experts.state_dict()] == ["deepspeed_experts.6.weight", "deepspeed_experts.7.weight"]
    experts.place(0)
    assert [name for name, _ in experts.named_parameters()] == ["deepspeed_experts.0.weight", "deepspeed_experts.1.weight"]


@pytest.mark.parametrize("rows_per_expert", [(2, 3, 1), (0, 6, 0), (0, 0, 0)], ids=str)
def test_each_expert_runs_on_its_own_rows_and_gets_a_gradient(rows_per_expert: tuple[int, ...]) -> None:
    experts = Experts(nn.Linear(4, 5), 3)
    for number, expert in enumerate(experts.deepspeed_experts):
        nn.init.constant_(expert.bias, number)  # type: ignore[arg-type]
    rows = torch.randn(sum(rows_per_expert), 4, requires_grad=True)
    output = experts(rows, rows_per_expert)
    number_R = torch.repeat_interleave(torch.arange(3), torch.tensor(rows_per_expert))
    weight = experts.deepspeed_experts[0].weight
    torch.testing.assert_close(output, rows @ weight.T + number_R[:, None])  # type: ignore[operator]
    output.sum().backward()
    for count, expert in zip(rows_per_expert, experts.deepspeed_experts, strict=True):
        assert expert.bias.grad.tolist() == [count] * 5  # type: ignore[union-attr]


def test_a_deep_copy_can_be_marked_again() -> None:
    experts = copy.deepcopy(Experts(nn.Linear(4, 4), 2, expert_group_name(4)))
    experts.mark()
    assert {(p.allreduce, p.group_name) for p in experts.parameters()} == {(False, "ep_size_4")}  # type: ignore[attr-defined]


def test_experts_are_spread_when_other_ranks_hold_others() -> None:
    assert [Experts(nn.Linear(4, 4), 1, name).is_spread for name in (None, "ep_size_1", "ep_size_2")] == [False, False, True]


def test_the_state_dict_of_a_whole_layer_loads_on_a_rank_with_some_of_its_experts() -> None:
    whole, part = Experts(nn.Linear(4, 4), 4), Experts(nn.Linear(4, 4), 2, expert_group_name(2))
    for param in whole.parameters():
        nn.init.normal_(param)
    with pytest.raises(RuntimeError, match=r"is not known yet. Call deepspeed.initialize\(\)"):
        part.load_state_dict(whole.state_dict())
    part.place(1)
    part.load_state_dict(whole.state_dict())
    assert torch.equal(part.deepspeed_experts[0].weight, whole.deepspeed_experts[2].weight)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"Unexpected key.*deepspeed_experts.x.weight"):
        part.load_state_dict({**whole.state_dict(), "deepspeed_experts.x.weight": torch.zeros(4, 4)})


def test_a_state_dict_with_some_of_the_experts_is_not_copied_as_if_it_had_all() -> None:
    whole, part = Experts(nn.Linear(4, 4), 4), Experts(nn.Linear(4, 4), 2, expert_group_name(2))
    assert len(clone_tensors_for_torch_save(whole.state_dict())) == 8
    with pytest.raises(ValueError, match=r"deepspeed_experts has 2 experts of more .*save_16bit_model"):
        clone_tensors_for_torch_save(part.state_dict())


class GivesTwo(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return x * 2, "more"


def test_of_a_tuple_the_first_is_the_output() -> None:
    assert Experts(GivesTwo(), 2)(torch.ones(3, 2), (1, 2)).tolist() == [[2, 2]] * 3


def test_a_rank_without_experts_is_refused() -> None:
    with pytest.raises(ArgumentError, match="num_local_experts=0"):
        Experts(nn.Linear(4, 4), 0)


def test_copies_keep_the_marks_of_tensor_parallel_parts() -> None:
    expert = nn.Linear(2, 3)
    expert.weight.tensor_model_parallel, expert.weight.partition_dim = True, 0  # type: ignore[attr-defined]
    for made in Experts(expert, 2).deepspeed_experts:
        assert vars(made.weight)["tensor_model_parallel"]
        assert vars(made.weight)["partition_dim"] == 0
        assert "partition_dim" not in vars(made.bias)
