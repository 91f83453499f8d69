"""AutoTP inside an engine: Hugging Face models over tensor x data ranks, at every ZeRO stage, against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.errors import ArgumentError
from deepspeed.moe.auto_ep import SpreadExperts
from deepspeed.utils import groups
from tests.support.cut_net import cuts_of, part_of
from tests.support.engines import config, masters, zero
from tests.support.families import WithLoss, build, double_throughout, tokens
from tests.support.ranks import run_ranks

STEPS, CLIP, RATE = 10, 0.5, 1e-3
ROUNDING = 1e-10
"""fp64 rounds at 1.1e-16 per operation; ten steps of Adam, which divides by the roots of small numbers."""


def _own_experts(model: nn.Module, name: str, whole: Tensor) -> Tensor:
    """Of a parameter in which experts are stacked, this rank's."""
    owner, _, key = name.rpartition(".")
    module = model.get_submodule(owner)
    if not isinstance(module, SpreadExperts):
        return whole
    cut = dict(module.cuts())[key]
    return part_of(cut, groups.get_current().axis("expert").rank, whole)


def _reference(whole: nn.Module, data: int, accumulation: int) -> tuple[list[float], list[float]]:
    """Train in place; losses and norms."""
    optimizer = torch.optim.AdamW(whole.parameters(), lr=RATE, weight_decay=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        shares = [tokens(seed=_seed(step, micro, rank)) for micro in range(accumulation) for rank in range(data)]
        total = torch.stack([whole(ids) for ids in shares]).mean()
        total.backward()
        norms.append(nn.utils.clip_grad_norm_(whole.parameters(), CLIP).item())
        optimizer.step()
        losses.append(total.item())
    return losses, norms


def _seed(step: int, micro: int, rank: int) -> int:
    return 1000 * step + 10 * micro + rank


def _train(rank: int, world_size: int, family: str, tensor: int, stages: tuple[int, ...], more: dict[str, Any]) -> list[str]:
    """What is wrong, a line each."""
    return [line for stage in stages for line in _compare(world_size, family, tensor, stage, more)]


def _compare(world_size: int, family: str, tensor: int, stage: int, more: dict[str, Any]) -> list[str]:
    data, accumulation = world_size // tensor, 2  # sequence-parallel ranks see other rows here: their own tokens
    with double_throughout(family):
        whole = WithLoss(build(family))
        cut = copy.deepcopy(whole)
        losses, norms = _reference(whole, data, accumulation)
        settings = config(
            accumulation,
            1,
            **zero(stage, reduce_bucket_size=2000),
            gradient_clipping=CLIP,
            optimizer={"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.1, "torch_adam": True}},
            tensor_parallel={"autotp_size": tensor},
            **more,
        )
        if stage == 3:
            settings["zero_optimization"]["stage3_param_persistence_threshold"] = 30
        engine = deepspeed.initialize(model=cut, config=settings)[0]
        found_norms, found_losses = [], []
        for step in range(STEPS):
            own = []
            for micro in range(accumulation):
                loss = engine(tokens(seed=_seed(step, micro, groups.get_current().zero_group.rank)))
                engine.backward(loss)
                engine.step()
                own.append(loss.item())
            found_norms.append(engine.get_global_grad_norm())
            found_losses.append(sum(own) / accumulation)
        got, cuts, place = masters(engine), cuts_of(cut), engine.get_model_parallel_rank()
        engine.destroy()
    where = f"{family}, stage {stage}, tp {tensor}, dp {data}, {more}"
    wrong = [] if cuts else [f"{where}: nothing was cut"]
    if found_norms != pytest.approx(norms, rel=ROUNDING):
        wrong.append(f"{where}: norms {found_norms}, not {norms}")
    if data == 1 and found_losses != pytest.approx(losses, rel=ROUNDING):
        wrong.append(f"{where}: losses {found_losses}, not {losses}")
    for name, value in whole.named_parameters():
        want = part_of(cuts[name], place, value.detach()) if name in cuts else value.detach()
        want = _own_experts(cut, name, want)
        off = (got[name] - want).abs().max().item() if want.numel() else 0.0
        if not off <= ROUNDING:
            wrong.append(f"{where}: {name} is off by {off:g}")
    return wrong


@pytest.mark.parametrize(
    ("family", "world_size", "tensor"),
    [
        ("llama", 2, 2),
        ("llama", 4, 2),
        ("llama_tied", 4, 2),
        ("gpt2", 4, 2),
        ("gemma", 4, 4),
        ("falcon_mqa", 4, 2),
        ("mixtral", 4, 2),
        ("qwen2_moe", 2, 2),
    ],
)
def test_families_train_as_one_process_does(family: str, world_size: int, tensor: int) -> None:
    for wrong in run_ranks(_train, world_size, family, tensor, (0, 1, 2, 3), {}, timeout_seconds=120):
        assert wrong == []


def test_tensor_and_sequence_ranks_together_train_as_one_process_does() -> None:
    more = {"sequence_parallel_size": 2}
    for wrong in run_ranks(_train, 4, "llama", 2, (0, 1, 3), more, timeout_seconds=120):
        assert wrong == []


def test_tensor_ranks_and_experts_over_data_ranks_together_train_as_one_process_does() -> None:
    more = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
    for wrong in run_ranks(_train, 4, "mixtral", 2, (0, 1, 2, 3), more, timeout_seconds=120):
        assert wrong == []


def _batches(rank: int, world_size: int, sizes: dict[str, int]) -> tuple[int, int, int]:
    settings = {**sizes, "tensor_parallel": {"autotp_size": 2}, "optimizer": {"type": "AdamW", "params": {}}}
    engine = deepspeed.initialize(model=WithLoss(build("llama")), config=settings)[0]
    return engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((2, 2), (8, 2, 2)),
        ((2, 2, 8), (8, 2, 2)),
        ((2, 2, 16), (8, 2, 2)),  # as the original counts: four ranks, although two of them see the same
    ],
)
def test_the_batch_counts_data_parallel_ranks_alone(sizes: tuple[int, ...], expected: tuple[int, int, int]) -> None:
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    assert run_ranks(_batches, 4, dict(zip(keys, sizes, strict=False))) == [expected] * 4


def _recorded(rank: int, world_size: int, tp_size: int, told: int | None) -> tuple[int, int] | str:
    model = deepspeed.tp_model_init(WithLoss(build("llama")), tp_size=tp_size, dtype=torch.float32)
    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {}}}
    if told is not None:
        settings["tensor_parallel"] = {"autotp_size": told}
    try:
        engine = deepspeed.initialize(model=model, config=settings)[0]
    except ArgumentError as error:
        return str(error)
    return engine.mp_world_size, engine.dp_world_size


@pytest.mark.parametrize(("told", "expected"), [(None, (2, 1)), (2, (2, 1)), (4, "Give the same number of ranks")])
def test_what_tp_model_init_was_told_counts(told: int | None, expected: tuple[int, int] | str) -> None:
    for found in run_ranks(_recorded, 2, 2, told):
        if isinstance(expected, str):
            assert isinstance(found, str)
            assert expected in found
        else:
            assert found == expected
