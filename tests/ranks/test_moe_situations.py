"""Experts that are spread over ranks, in the situations that a training meets."""

from __future__ import annotations

import copy
import csv
import functools
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deepspeed
from deepspeed.errors import ArgumentError, UnbuiltFeatureError, UsageError
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.ops.lamb import FusedLamb
from deepspeed.utils import groups, safe_get_full_fp32_param
from deepspeed.zero.sanity import ValuesDifferError
from tests.support.engines import Outcome, config, gathered, make_engine, masters, train, zero
from tests.support.models import Batches, cast_batches, make_batches
from tests.support.moe_models import MoeNet, fill, moe_net
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference, train_reference

STEPS = 4
ROWS = 4


def _adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def _batches(world_size: int, dtype: torch.dtype = torch.float64) -> Batches:
    return cast_batches(make_batches(moe_net(), STEPS, 1, world_size, ROWS), dtype)


def _join(of_ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    joined: dict[str, Tensor] = {}
    for of_rank in of_ranks:
        joined |= of_rank
    return joined


def _train(model: MoeNet, rank: int, world_size: int, optimizer: Any, **blocks: Any) -> Outcome:
    engine = make_engine(model, config(1, ROWS, **blocks), optimizer=optimizer)
    outcome = train(engine, _batches(world_size), rank)
    engine.destroy()
    return outcome


def _without_tokens(model: MoeNet) -> MoeNet:
    for layer in model.layers:
        gate = layer.deepspeed_moe.gate.wg.weight
        gate.requires_grad_(False).zero_()  # equal probabilities: every token goes to the first expert
    return model


def _starve(rank: int, world_size: int) -> list[Outcome]:
    outcomes = []
    for stage in range(4):
        model = _without_tokens(moe_net((4,), 2, k=1))
        trained = [p for p in model.parameters() if p.requires_grad]
        outcomes.append(_train(model, rank, world_size, _adam(trained), **zero(stage, stage3_param_persistence_threshold=0)))
    return outcomes


def test_experts_without_tokens_train_without_waiting_for_anybody() -> None:
    ranks = run_ranks(_starve, 2)
    model = _without_tokens(moe_net((4,), 1, k=1))
    trained_by = functools.partial(train_reference, model, _adam, _batches(2), unused_counts_as_zero=True)
    want = trained_by()
    for stage in range(4):
        assert relative_difference(_join([each[stage].weights for each in ranks]), want.weights) <= FP64_ROUNDING


def _overflow(rank: int, world_size: int, stage: int) -> tuple[list[int], list[float], list[str]]:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("DeepSpeed").addHandler(handler)
    model = moe_net((4,), 2, torch.float32)
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    engine = make_engine(model, config(1, ROWS, fp16=fp16, **zero(stage)), optimizer=_adam(model.parameters()))
    if rank == 1:  # it holds experts 2 and 3
        broken = engine.module.layers[0].deepspeed_moe.experts.deepspeed_experts[1].down.weight
        broken.register_hook(lambda grad: torch.full_like(grad, float("inf")) if engine.global_steps == 1 else grad)
    skipped, scales = [], []
    for (micro_batch,) in _batches(world_size, torch.float16):
        engine.backward(engine(*micro_batch[rank]))
        engine.step()
        skipped.append(engine.skipped_steps)
        scales.append(engine.optimizer.loss_scale)
    return skipped, scales, [text for text in seen if "skipped" in text]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_overflow_in_one_ranks_expert_skips_the_step_everywhere_and_is_named(stage: int) -> None:
    (skipped, scales, told), (other_skipped, other_scales, other_told) = run_ranks(_overflow, 2, stage)
    assert skipped == other_skipped == [0, 1, 1, 1]
    assert scales == other_scales == [256.0, 128.0, 128.0, 128.0]
    assert other_told == []
    (text,) = told
    assert "layers.0.deepspeed_moe.experts.deepspeed_experts.3.down.weight" in text
    assert "brought by rank 1" in text


OPTIMIZERS: dict[str, Any] = {
    "adam": _adam,
    "lamb": functools.partial(FusedLamb, lr=0.01),
    "lamb's norm": functools.partial(FusedLamb, lr=0.01, max_grad_norm=0.02),
}

CLIP = 0.05
CLIPS = {"lamb's norm": 0.0}


def _vary(rank: int, world_size: int, how: str, stage: int) -> dict[str, Tensor]:
    model = moe_net((4,), 2, k=2)
    blocks: dict[str, Any] = zero(stage, stage3_param_persistence_threshold=20) | {"gradient_clipping": CLIPS.get(how, CLIP)}
    params: Any = list(model.parameters())
    optimizer = OPTIMIZERS.get(how, _adam)
    if how == "split groups":
        params = split_params_into_different_moe_groups_for_optimizer({"params": params, "name": "all"})
        assert [group.get("moe", False) for group in params] == [False, True]
    if how == "a deep copy":
        model = copy.deepcopy(model)
        params = list(model.parameters())
    if how == "data first":
        blocks["use_data_before_expert_parallelism"] = True
    if how == "sanity checks":
        blocks["zero_optimization"]["enable_sanity_checks"] = True
    if how == "offload":
        blocks["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
        blocks["zero_force_ds_cpu_optimizer"] = False
    if how == "state on NVMe":
        block = {"device": "nvme", "nvme_path": tempfile.gettempdir(), "buffer_count": 5}
        blocks["zero_optimization"] |= {"offload_optimizer": block, "sub_group_size": 64}
        blocks["zero_force_ds_cpu_optimizer"] = False
    if how == "all-reduce gathers":
        blocks["zero_optimization"]["stage3_use_all_reduce_for_fetch_params"] = True
    if how == "data first":
        for layer in model.layers:  # named for the ranks that will hold them
            layer.deepspeed_moe.experts.place(rank // 2)
        model = fill(model, torch.float64)
        params = list(model.parameters())
    return _train(model, rank, world_size, optimizer(params), **blocks).weights


VARIATIONS = [
    ("split groups", 2),
    ("split groups", 3),
    ("a deep copy", 1),
    ("data first", 0),
    ("data first", 2),
    ("sanity checks", 0),
    ("sanity checks", 1),
    ("lamb", 0),
    ("lamb", 2),
    ("lamb's norm", 0),
    ("lamb's norm", 1),
    ("offload", 3),
    ("state on NVMe", 1),
    ("state on NVMe", 3),
    ("all-reduce gathers", 3),
]


@pytest.mark.parametrize(("how", "stage"), VARIATIONS, ids=str)
def test_numbers_are_those_of_one_process(how: str, stage: int) -> None:
    got = _join(run_ranks(_vary, 4, how, stage))
    optimizer = OPTIMIZERS.get(how, _adam)
    clip = CLIPS.get(how, CLIP) or None
    want = train_reference(moe_net((4,), 1, k=2), optimizer, _batches(4), clip=clip, unused_counts_as_zero=True)
    assert relative_difference(got, want.weights) <= FP64_ROUNDING


def _ask(rank: int, world_size: int) -> tuple[Any, ...]:
    model = moe_net((4, 8), 2)
    engine = make_engine(model, config(1, ROWS), optimizer=_adam(model.parameters()))
    assert engine.has_moe_layers
    assert engine.num_experts == (4, 8)
    assert engine.dp_world_size == world_size
    name = "ep_size_2"
    expert = deepspeed.comm.get_all_ranks_from_group(groups._get_expert_parallel_group(name))
    data = deepspeed.comm.get_all_ranks_from_group(groups._get_expert_data_parallel_group("ep_size_2"))
    return (
        expert,
        data,
        groups._get_expert_parallel_rank("ep_size_2"),
        groups._get_expert_data_parallel_world_size("ep_size_2"),
    )


def test_the_groups_can_be_asked_for() -> None:
    assert run_ranks(_ask, 4) == [
        ([0, 1], [0, 2], 0, 2),
        ([0, 1], [1, 3], 1, 2),
        ([2, 3], [0, 2], 0, 2),
        ([2, 3], [1, 3], 1, 2),
    ]


class _Mpu:
    """Groups of a caller: data-parallel ranks as `ranks` says."""

    def __init__(self, rank: int, ranks: list[list[int]]) -> None:
        groups_of = [deepspeed.comm.new_group(each) for each in ranks]
        place = next(place for place, each in enumerate(ranks) if rank in each)
        self.get_data_parallel_group = lambda: groups_of[place]
        self.get_data_parallel_world_size = lambda: len(ranks[place])


def _over_an_mpu(rank: int, world_size: int) -> tuple[dict[str, Tensor], list[int]]:
    model = moe_net((4,), 2, k=2)
    settings = config(1, ROWS, gradient_clipping=0.05, **zero(1))
    engine = make_engine(model, settings, optimizer=_adam(model.parameters()), mpu=_Mpu(rank, [[0, 1, 2, 3]]))
    data = deepspeed.comm.get_all_ranks_from_group(groups._get_expert_data_parallel_group())
    return train(engine, _batches(world_size), rank).weights, data


def test_experts_are_spread_over_the_data_parallel_ranks_of_an_mpu() -> None:
    weights, data = zip(*run_ranks(_over_an_mpu, 4), strict=True)
    want = train_reference(moe_net((4,), 1, k=2), _adam, _batches(4), clip=0.05)
    assert relative_difference(_join(list(weights)), want.weights) <= FP64_ROUNDING
    assert list(data) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def _refused(rank: int, world_size: int, how: str) -> str:
    model = moe_net((4, 4), 2)
    settings = config(1, ROWS, **zero(3))
    if how == "two sizes":
        model.layers[1] = moe_net((4,), 4).layers[0]
    if how == "does not divide":
        model = moe_net((9,), 3)
    if how == "zero.Init":
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = MoeNet((4,), 2)
    if how == "strays":
        model = moe_net((4,), 1)
        for param in model.first.parameters():
            param.allreduce, param.group_name = False, "ep_size_2"  # type: ignore[attr-defined]
    if how == "nvme":
        block = {"device": "nvme", "nvme_path": "/tmp", "max_in_cpu": 0}
        settings["zero_optimization"] |= {"offload_param": block, "stage3_param_persistence_threshold": 0}
    try:
        make_engine(model, settings, optimizer=_adam(model.parameters()))
    except (ArgumentError, UsageError, UnbuiltFeatureError) as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("two sizes", "MoE layers of one model have ep_size 2 and 4"),
        ("does not divide", "experts over 3 ranks (ep_size) do not divide the 4 data-parallel ranks"),
        ("zero.Init", "were made under deepspeed.zero.Init"),
        ("strays", "parameter 'first.weight' is marked as an expert's (allreduce=False, group_name='ep_size_2')"),
        ("nvme", 'zero_optimization.offload_param.device = "nvme" with experts'),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(how: str, text: str) -> None:
    for told in run_ranks(_refused, 4, how):
        assert text in told


def _edit(rank: int, world_size: int) -> tuple[bool, bool]:
    model = moe_net((4,), 2)
    settings = config(1, ROWS, **zero(3, stage3_param_persistence_threshold=0))
    engine = make_engine(model, settings, optimizer=_adam(model.parameters()))
    before = masters(engine)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        for param in engine.module.parameters() if rank == 0 else ():
            param.data.add_(1.0)
    after = masters(engine)
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    experts = {name for name in after if "deepspeed_experts" in name}
    with gathered(engine, list(engine.module.parameters())):
        dense_of_rank_0 = all(name in changed for name in after.keys() - experts)
    return dense_of_rank_0, bool(changed & experts)


def test_edits_of_one_rank_reach_the_experts_that_it_holds_and_no_others() -> None:
    assert run_ranks(_edit, 4) == [(True, True), (True, False), (True, True), (True, False)]


def _differ(rank: int, world_size: int) -> str:
    model = moe_net((4,), 2)
    engine = make_engine(model, config(1, ROWS, **zero(0, enable_sanity_checks=True)), optimizer=_adam(model.parameters()))
    expert = engine.module.layers[0].deepspeed_moe.experts.deepspeed_experts[0]
    if rank == 3:
        expert.up.weight.data.add_(1.0)
    assert safe_get_full_fp32_param(expert.up.weight) is not None
    try:
        train(engine, _batches(world_size)[:1], rank)
    except ValuesDifferError as error:
        return str(error)
    return ""


def test_a_replica_of_an_expert_that_differs_is_noticed_on_all_ranks() -> None:
    told = run_ranks(_differ, 4)
    assert len(set(told)) == 1
    assert "values that ranks [1, 3] must hold alike differ" in told[0]
    assert "deepspeed_experts" in told[0]


def _monitored(rank: int, world_size: int, folder: str) -> int:
    model = moe_net((4,), 2, k=2)
    monitor = {"enabled": True, "output_path": folder, "job_name": "run"}
    engine = make_engine(model, config(1, ROWS, csv_monitor=monitor), optimizer=_adam(model.parameters()))
    train(engine, _batches(world_size), rank)
    engine.destroy()
    return sum(1 for _ in Path(folder).rglob("*.csv"))


def test_monitors_get_the_tokens_of_each_expert_over_all_ranks(tmp_path: Path) -> None:
    run_ranks(_monitored, 2, str(tmp_path))
    files = {path.name: list(csv.reader(path.open())) for path in tmp_path.rglob("*moe*.csv")}
    assert len(files) == 4 + 2
    rows = [lines[1:] for name, lines in files.items() if "tokens" in name]
    assert len(rows) == 4
    for step in range(STEPS):
        assert sum(float(lines[step][1]) for lines in rows) == 2 * ROWS * 2  # each token has k = 2 experts, on two ranks
    assert all(float(line[1]) == 0.0 for name, lines in files.items() if "dropped" in name for line in lines[1:])
