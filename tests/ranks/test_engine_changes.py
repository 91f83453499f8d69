"""What changes while training: batch sizes, what is frozen, who owns the model. Right numbers, or an error that cures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.errors import ArgumentError, CheckpointError, UsageError
from tests.support.engines import config, make_engine, masters
from tests.support.models import Mlp, build, make_batches
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference

RATE = 0.1


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)


def _changing_batch(rank: int, world_size: int) -> float:
    model, reference = build(Mlp, dtype=torch.float64), build(Mlp, dtype=torch.float64)
    engine = make_engine(model, config(1), optimizer=sgd(model))
    optimizer = sgd(reference)
    for number, micro_batches in enumerate((2, 3, 1, 4)):
        engine.set_train_batch_size(4 * micro_batches * world_size)
        assert engine.gradient_accumulation_steps() == micro_batches
        (step,) = make_batches(model, 1, micro_batches, world_size, seed=number + 1)
        for micro in step:
            engine.backward(engine(*micro[rank]))
            engine.step()
        assert engine.was_step_applied()
        optimizer.zero_grad()
        (sum(reference(*batch) for micro in step for batch in micro) / (micro_batches * world_size)).backward()
        optimizer.step()
    return relative_difference(masters(engine), {n: p.detach() for n, p in reference.named_parameters()})


def test_the_accumulation_may_change_between_steps() -> None:
    assert max(run_ranks(_changing_batch, 2)) <= FP64_ROUNDING


def _another_rhythm(rank: int, world_size: int, folder: str) -> None:
    model = build(Mlp, dtype=torch.float64)
    saved = make_engine(model, config(2), optimizer=sgd(model))
    (step,) = make_batches(model, 1, 3, world_size)
    for micro in step:  # one whole window and half of the next
        saved.backward(saved(*micro[rank]))
        saved.step()
    saved.save_checkpoint(folder, tag="t")
    other = build(Mlp, dtype=torch.float64, seed=3)
    loaded = make_engine(other, config(4), optimizer=sgd(other))
    loaded.backward(loaded(*step[0][rank]))  # belongs to the weights before the load
    loaded.load_checkpoint(folder)
    assert all(p.grad is not None and not p.grad.any() for p in other.parameters())
    boundaries = []
    for _ in range(4):
        boundaries.append(loaded.is_gradient_accumulation_boundary())
        loaded.backward(loaded(*step[0][rank]))
        loaded.step()
    assert boundaries == [False, False, False, True]


def test_a_checkpoint_loads_into_another_accumulation_with_a_whole_window(tmp_path: Any) -> None:
    run_ranks(_another_rhythm, 2, str(tmp_path))


def _foreign_optimizer(rank: int, world_size: int, folder: str) -> None:
    model = build(Mlp)
    saved = make_engine(model, config(), optimizer=torch.optim.AdamW(model.parameters(), lr=RATE))
    saved.backward(saved(*make_batches(model, 1, 1, world_size)[0][0][rank]))
    saved.step()
    saved.save_checkpoint(folder, tag="t")
    other = build(Mlp)
    loaded = make_engine(other, config(), optimizer=sgd(other))
    with pytest.raises(CheckpointError, match=r"AdamW.*load_optimizer_states=False"):
        loaded.load_checkpoint(folder)
    twin = build(Mlp)
    block = {"type": "Adam", "params": {"lr": RATE}}
    make_engine(twin, config(optimizer=block)).load_checkpoint(folder)


def test_state_of_another_kind_of_optimizer_is_refused(tmp_path: Any) -> None:
    run_ranks(_foreign_optimizer, 1, str(tmp_path))


@pytest.mark.parametrize("is_frozen_first", [False, True])
def test_freezing_and_thawing_after_the_start_are_refused(is_frozen_first: bool) -> None:
    run_ranks(_freezing, 1, is_frozen_first)


def _freezing(rank: int, world_size: int, is_frozen_first: bool) -> None:
    model = build(Mlp)
    model.first.requires_grad_(not is_frozen_first)
    engine = make_engine(model, config(), optimizer=sgd(model))
    batch = make_batches(model, 1, 1, world_size)[0][0][rank]
    model.first.requires_grad_(is_frozen_first)
    engine.backward(engine(*batch))
    with pytest.raises(UsageError, match=r"first\.weight.*initialize\(\) again"):
        engine.step()


def _foreign_cast(rank: int, world_size: int) -> None:
    model = build(Mlp)
    trains = make_engine(model, config(), optimizer=sgd(model))
    make_engine(model, config())  # looks on in the same precision
    with pytest.raises(ArgumentError, match=r"first\.weight.*destroy"):
        make_engine(model, config(bf16={"enabled": True}))
    trains.destroy()
    make_engine(model, config(bf16={"enabled": True}))


def test_an_engine_without_optimizer_does_not_cast_a_model_that_another_trains() -> None:
    run_ranks(_foreign_cast, 1)


class Normalised(nn.Module):
    """Batch normalisation between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


def _batch_norm(rank: int, world_size: int, kind: str) -> None:
    model = Normalised()
    engine = make_engine(model, config(**{kind: {"enabled": True}}), optimizer=sgd(model))
    norm = model.net[1]
    assert isinstance(norm, nn.BatchNorm2d)
    before = norm.weight.detach().clone()
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 2, 8, 8).to(model.net[0].weight.dtype)))  # type: ignore[arg-type]
        engine.step()
    assert norm.running_mean is not None
    assert norm.weight.dtype == norm.running_mean.dtype == torch.float32
    assert kind == "fp16" or not torch.equal(norm.weight, before)  # fp16 may still be finding its scale


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_batch_normalisation_trains_in_sixteen_bits_with_exact_statistics(kind: str) -> None:
    run_ranks(_batch_norm, 1, kind)


def _other_members(rank: int, world_size: int) -> None:
    model = build(Mlp)
    engine = make_engine(model, config(), optimizer=sgd(model))
    with pytest.raises(ValueError, match=r"module\.state_dict"):
        engine._zero3_consolidated_16bit_state_dict()
    assert engine.zero_sub_group_size() == 1_000_000_000
    assert engine.zero_hpz_partition_size() == 1
    assert not engine.zero_cpu_offload()
    assert engine.optimizer is not None
    assert not engine.optimizer.skip_step
    with pytest.raises(AttributeError, match="no_such_thing"):
        engine.no_such_thing  # noqa: B018


def test_documented_members_answer() -> None:
    run_ranks(_other_members, 1)
