"""Which parameters are laid out together, which are sharded, and where their gradients are kept, at each ZeRO stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.axes import ModelAxes, ZeroAxes
from deepspeed.engine.partition import Partition, attach_gradient_stores, plan_partition
from deepspeed.errors import ArgumentError
from deepspeed.precision.policy import DtypePolicy
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.flat import owner_of
from deepspeed.zero.gradients import ShardedGradients, ViewGradients, WholeGradients

ALONE = AxisGroup([0], 0, group=object())  # type: ignore[arg-type]


def settings(stage: int, **blocks: Any) -> DeepSpeedConfig:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 20, **blocks.pop("zero", {})}
    return DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **blocks})


def plan(model: nn.Module, config: DeepSpeedConfig, optimizer: torch.optim.Optimizer | None) -> Partition:
    policy = DtypePolicy.from_config(config, "cpu")
    dense = ZeroAxes.of(ALONE, config.zero_optimization.stage)
    axes = ModelAxes(dense, dense, ALONE, has_replicas=False, tensor=ALONE, parts=ALONE)
    partition = plan_partition(model, config, axes, policy, optimizer)
    attach_gradient_stores(partition, config, policy)
    return partition


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))


def names(partition: Partition) -> list[list[str]]:
    return [[member.name for member in flat.members] for flat in partition.flats]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_one_group_of_whole_parameters(stage: int) -> None:
    model = two_layers()
    partition = plan(model, settings(stage), torch.optim.SGD(model.parameters(), lr=0.1))
    assert names(partition) == [["0.weight", "0.bias", "1.weight", "1.bias"]]
    assert partition.sharded == ()
    assert partition.units == ()
    assert all(p.numel() for p in model.parameters())


def test_stage_3_shards_all_but_small_parameters_trained_or_not() -> None:
    model = two_layers()
    model[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    partition = plan(model, settings(3, zero={"stage3_param_persistence_threshold": 8}), torch.optim.SGD(trained, lr=0.1))
    sharded = {member.name for flat in partition.sharded for member in flat.members}
    assert sharded == {"0.weight", "1.weight"}
    assert {member.name for flat in partition.frozen for member in flat.members} == {"0.weight"}
    assert {name for name, p in model.named_parameters() if p.numel() == 0} == sharded
    assert owner_of(model[0].bias) is None  # small and frozen: nobody's business


def test_small_parameters_are_sharded_too_once_all_of_them_together_are_not_small() -> None:
    model = two_layers()  # 64 + 8 + 16 + 2 elements
    limits = {"stage3_param_persistence_threshold": 20, "stage3_model_persistence_threshold": 20}
    partition = plan(model, settings(3, zero=limits), torch.optim.SGD(model.parameters(), lr=0.1))
    assert {member.name for flat in partition.sharded for member in flat.members} == {"0.weight", "1.weight"}


def test_groups_of_the_optimizer_and_dtypes_are_laid_out_apart() -> None:
    model = two_layers()
    model[1].double()
    groups = [{"params": model[0].parameters()}, {"params": [*model[1].parameters()], "lr": 0.2}]
    partition = plan(model, settings(1), torch.optim.SGD(groups, lr=0.1))
    assert names(partition) == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    assert [flat.kind.group_index for flat in partition.flats] == [0, 1]
    assert [flat.kind.master_dtype for flat in partition.flats] == [torch.float32, torch.float64]


def test_frozen_parameters_of_an_optimizer_are_left_alone() -> None:
    model = two_layers()
    model[0].weight.requires_grad_(False)
    partition = plan(model, settings(2), torch.optim.SGD(model.parameters(), lr=0.1))
    assert names(partition) == [["0.bias", "1.weight", "1.bias"]]


def test_a_parameter_of_another_model_is_refused_with_its_group_and_shape() -> None:
    model = two_layers()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3, 5))], lr=0.1)
    with pytest.raises(ArgumentError, match=r"group 0 .*\(3, 5\)"):
        plan(model, settings(0), optimizer)


def test_without_an_optimizer_only_stage_3_lays_anything_out() -> None:
    model = two_layers()
    assert plan(model, settings(2), None).flats == ()
    partition = plan(model, settings(3), None)
    assert partition.trained == ()
    assert {member.name for flat in partition.frozen for member in flat.members} == {"0.weight"}


@pytest.mark.parametrize(
    ("stage", "blocks", "kinds"),
    [
        (0, {}, {ViewGradients}),
        (0, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, {WholeGradients}),
        (1, {}, {ViewGradients}),  # one rank: the shard is the whole
        (2, {}, {ViewGradients}),
        (3, {}, {ViewGradients, ShardedGradients}),
    ],
)
def test_where_gradients_are_kept(stage: int, blocks: dict[str, Any], kinds: set[type]) -> None:
    model = two_layers()
    partition = plan(model, settings(stage, **blocks), torch.optim.SGD(model.parameters(), lr=0.1))
    assert {type(flat.gradients) for flat in partition.trained} == kinds


@pytest.mark.parametrize("stage", [0, 1])
def test_tables_whose_gradient_is_sparse_travel_row_by_row_at_stage_0_only(stage: int) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    partition = plan(model, settings(stage), torch.optim.SGD(model.parameters(), lr=0.1))
    row_sparse = [member.name for flat in partition.flats if flat.kind.is_row_sparse for member in flat.members]
    assert row_sparse == (["0.weight"] if stage == 0 else [])


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_without_elements_have_a_place(stage: int) -> None:
    model = nn.ParameterDict({"empty": nn.Parameter(torch.zeros(0, 4)), "full": nn.Parameter(torch.ones(30))})
    partition = plan(model, settings(stage), torch.optim.SGD(model.parameters(), lr=0.1))
    assert {name for group in names(partition) for name in group} == {"empty", "full"}
