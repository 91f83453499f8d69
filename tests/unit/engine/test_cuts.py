"""What of a checkpoint's tensors a rank holds: asked of modules, and of Megatron's marks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.checkpoint import Piece
from deepspeed.config.parallel import ExpertParallelConfig
from deepspeed.engine.cuts import Cuts
from deepspeed.engine.experts import gather_experts_together, is_name_of_experts, name_on_rank, spread_experts
from deepspeed.errors import UsageError
from deepspeed.moe.auto_ep import apply_auto_ep
from deepspeed.sharding import Cut, Span
from deepspeed.topology import groups
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.leaf import get_z3_leaf_modules
from tests.support.cut_net import CutNet, cut_net
from tests.unit.moe.test_auto_ep import Block
from tests.unit.moe.test_stacked import EXPERTS, INNER, WIDTH, Stack


def _cuts(module: nn.Module, *, tensor: int = 1, expert: int = 1, rank: int = 0) -> Cuts:
    return Cuts(
        module,
        {
            "tensor": AxisGroup(range(tensor), min(rank, tensor - 1)),
            "expert": AxisGroup(range(expert), min(rank, expert - 1)),
        },
    )


def _experts(ep_size: int, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), Block(Stack()))
    apply_auto_ep(model, ExpertParallelConfig(enabled=True, autoep_size=ep_size))

    class Mesh:
        @staticmethod
        def axis(name: str) -> AxisGroup:
            return AxisGroup(range(ep_size), rank)

    monkeypatch.setattr(groups, "get_current", lambda: Mesh)
    model[1].experts.set_deepspeed_parallelism()  # type: ignore[operator, union-attr]
    return model


def test_stacked_experts_are_parts_and_everything_else_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _cuts(_experts(2, monkeypatch, rank=1), expert=2, rank=1)
    name, half = "1.experts.down_proj", EXPERTS // 2
    assert name in found
    assert found.is_along("expert", name)
    assert not found.is_along("tensor", name)
    assert "1.gate.weight" not in found
    assert found.shape(name, (half, WIDTH, INNER)) == (EXPERTS, WIDTH, INNER)
    assert found.shape("1.gate.weight", (EXPERTS, WIDTH)) == (EXPERTS, WIDTH)
    whole = torch.arange(EXPERTS * WIDTH * INNER).view(EXPERTS, WIDTH, INNER)
    assert torch.equal(found.part(name, whole), whole[half:])
    assert found.part(name, whole[half:]).shape == (half, WIDTH, INNER)
    piece = found.piece("module/x", name, (half, WIDTH, INNER), 3, torch.zeros(2))
    assert (piece.shape, piece.start) == ((EXPERTS, WIDTH, INNER), half * WIDTH * INNER + 3)
    value = torch.zeros(EXPERTS, WIDTH)
    assert found.part("1.gate.weight", value) is value
    assert found.piece("module/y", "1.gate.weight", (EXPERTS, WIDTH), 3, value) == Piece(
        "module/y", (EXPERTS, WIDTH), 3, value
    )


def test_on_one_rank_there_are_none() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Block(Stack()))
    apply_auto_ep(model, ExpertParallelConfig(enabled=True, autoep_size=1))
    assert "1.experts.down_proj" not in _cuts(model)


def test_the_engine_takes_experts_for_experts_under_one_name_on_all_ranks() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Block(Stack()))
    apply_auto_ep(model, ExpertParallelConfig(enabled=True, autoep_size=2))
    experts = dict(model[1].experts.named_parameters())  # type: ignore[union-attr]
    assert spread_experts(model) == {id(param) for param in experts.values()}
    assert all(is_name_of_experts(model)(f"1.experts.{name}") for name in experts)
    assert not is_name_of_experts(model)("1.gate.weight")
    assert name_on_rank(model)("1.experts.down_proj") == "1.experts.down_proj"
    gather_experts_together(model)
    assert get_z3_leaf_modules(model) == [model[1].experts]  # type: ignore[union-attr]


def test_parts_of_tensor_parallel_layers_are_taken_from_the_whole() -> None:
    whole = cut_net().state_dict()
    for rank in range(2):
        model = cut_net().cut(rank, 2, None)
        found = _cuts(model, tensor=2, rank=rank)
        for name, value in model.state_dict().items():
            assert torch.equal(found.part(name, whole[name]), value)
        assert found.is_along("tensor", "first.down")
        assert "norm.weight" not in found


def test_a_tied_parameter_is_a_part_under_all_its_names() -> None:
    model: Any = cut_net().cut(0, 2, None)
    model.alias = nn.ParameterDict({"up": model.first.up})
    assert "alias.up" in _cuts(model, tensor=2)


def test_a_parameter_counts_on_the_first_rank_that_has_some_of_it() -> None:
    for rank, counts in enumerate([True, False, False]):
        model = CutNet(hidden=2).cut(rank, 3, None)
        assert _cuts(model, tensor=3, rank=rank).counts("first.up") is counts
    model = CutNet(hidden=2).cut(1, 3, None)
    model.first._cuts["up"] = Cut((2, CutNet.VALUES), 0, ((), (Span(0, 1),), (Span(1, 1),)))
    assert _cuts(model, tensor=3, rank=1).counts("first.up")
    assert _cuts(model, tensor=3, rank=1).counts("norm.weight")


def _marked(**marks: Any) -> nn.Module:
    model = nn.Linear(4, 6, bias=False)
    for name, value in marks.items():
        setattr(model.weight, name, value)
    return model


@pytest.mark.parametrize("mark", ["tensor_model_parallel", "model_parallel"])
def test_marks_of_megatron_say_equal_parts(mark: str) -> None:
    found = _cuts(_marked(**{mark: True, "partition_dim": 1}), tensor=3, rank=1)
    assert found.parts_of("weight") == Cut.of_widths((6, 12), 1, [4, 4, 4])
    assert "weight" not in _cuts(_marked(**{mark: False, "partition_dim": 1}), tensor=3)
    assert "weight" not in _cuts(_marked(**{mark: True, "partition_dim": 1}))


def test_fused_matrices_are_cut_each_for_itself() -> None:
    found = _cuts(_marked(tensor_model_parallel=True, partition_dim=0, partition_stride=2), tensor=2, rank=1)
    assert found.parts_of("weight").parts == ((Span(0, 3), Span(6, 3)), (Span(3, 3), Span(9, 3)))


def test_a_mark_without_a_dimension_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'weight' of shape .* partition_dim=-1 .* Set partition_dim"):
        _cuts(_marked(tensor_model_parallel=True), tensor=2)


def test_cuts_for_other_ranks_and_of_other_parts_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'first\.up' was cut for 3 ranks; the tensor axis has 2"):
        _cuts(cut_net().cut(0, 3, None), tensor=2)
    with pytest.raises(UsageError, match=r"rank 1 of the tensor axis holds \(4, \d+\) of 'first\.up'"):
        _cuts(cut_net().cut(0, 2, None), tensor=2, rank=1)
