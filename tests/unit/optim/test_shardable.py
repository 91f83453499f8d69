"""An optimizer that would go wrong on shards is refused with the reason; all others are told apart by what they need."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.errors import ArgumentError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.optim import check_shardable, is_elementwise

STAGES = (1, 2, 3)
WORLDS = (1, 2)
OURS: list[Any] = [FusedAdam, DeepSpeedCPUAdam, FusedLion, DeepSpeedCPULion, DeepSpeedCPUAdagrad]
NAMES = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
TORCHS: list[Any] = [getattr(torch.optim, name) for name in NAMES]


class Unknown(torch.optim.SGD):
    """A subclass may compute anything."""


class Shampoo(torch.optim.SGD):
    """As a package that is not installed would call it."""


class Refuses(torch.optim.SGD):
    elementwise = False


def made(kind: Any) -> Any:
    return kind([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1)


def answer(kind: Any, stage: int, world_size: int = 2, *, allows_untested: bool = False) -> bool:
    return check_shardable(made(kind), stage=stage, shard_world_size=world_size, allows_untested=allows_untested)


@pytest.mark.parametrize("kind", [*OURS, *TORCHS])
def test_an_element_wise_optimizer_may_be_cut_at_every_stage(kind: Any) -> None:
    assert all(answer(kind, stage, world_size) for stage in (0, *STAGES) for world_size in WORLDS)


@pytest.mark.parametrize("kind", [Unknown, Shampoo, Refuses, torch.optim.Adafactor, torch.optim.Muon, FusedLamb])
def test_at_stage_0_every_optimizer_with_a_plain_step_gets_whole_parameters(kind: Any) -> None:
    assert not answer(kind, 0)
    assert not answer(kind, 0, allows_untested=True)


def test_lamb_gets_its_part_of_each_parameter_at_every_stage() -> None:
    assert not any(answer(FusedLamb, stage, world_size) for stage in STAGES for world_size in WORLDS)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", WORLDS)
def test_an_unknown_optimizer_is_refused_with_the_key_that_allows_it(stage: int, world_size: int) -> None:
    with pytest.raises(ArgumentError, match=rf"Unknown at zero_optimization.stage {stage}: .*element-wise") as error:
        answer(Unknown, stage, world_size)
    assert '"zero_allow_untested_optimizer": true' in str(error.value)
    assert "use stage 0" in str(error.value)
    assert isinstance(error.value, AssertionError)  # what clients of the original catch


def test_an_unknown_optimizer_that_is_allowed_counts_as_element_wise_where_there_are_shards() -> None:
    assert all(answer(Unknown, stage, allows_untested=True) for stage in STAGES)
    assert not any(answer(Unknown, stage, 1, allows_untested=True) for stage in STAGES)
    assert not is_elementwise(made(Unknown))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (torch.optim.Muon, "orthogonalizes"),
        (torch.optim.Adafactor, "per row and per column"),
        (Shampoo, "preconditions"),
        (Refuses, "its class says so"),
    ],
)
@pytest.mark.parametrize("stage", STAGES)
def test_one_that_needs_whole_tensors_is_refused_on_shards_whatever_the_key_says(kind: Any, reason: str, stage: int) -> None:
    for allows_untested in (False, True):
        with pytest.raises(ArgumentError, match=rf"{kind.__name__} at .*stage {stage} on 3 ranks.*{reason}.*Use stage 0"):
            answer(kind, stage, 3, allows_untested=allows_untested)
    assert not answer(kind, stage, 1)


@pytest.mark.parametrize(
    ("kind", "reason"), [(torch.optim.LBFGS, "through a closure"), (torch.optim.SparseAdam, "sparse gradients alone")]
)
@pytest.mark.parametrize("stage", [0, *STAGES])
def test_one_that_an_engine_cannot_call_is_refused_at_every_stage(kind: Any, reason: str, stage: int) -> None:
    with pytest.raises(ArgumentError, match=f"{kind.__name__}: .*{reason}.*such as AdamW"):
        answer(kind, stage, 1, allows_untested=True)
