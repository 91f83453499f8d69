"""An engine over tensor-parallel ranks: parts and whole parameters train as one process does that has all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.errors import CommError
from tests.support.cut_net import CutNet, TensorUnit, cut_net, part_of
from tests.support.engines import Outcome, config, make_engine, train, zero
from tests.support.models import make_batches
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference, train_reference

STEPS = 6
ROWS = 4
CLIP = 0.1


def _adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def _train_parts(rank: int, world_size: int, stage: int, tensor: int, clip: float) -> Outcome:
    unit = TensorUnit(tensor)
    model = cut_net().cut(unit.get_model_parallel_rank(), tensor, unit.get_model_parallel_group())
    settings = config(2, ROWS, **zero(stage, reduce_bucket_size=100), gradient_clipping=clip)
    if stage == 3:
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 8
    engine = make_engine(model, settings, mpu=unit, optimizer=_adam(model.parameters()))
    batches = make_batches(cut_net(), STEPS, 2, world_size // tensor, ROWS)
    return train(engine, batches, unit.get_data_parallel_rank())


@pytest.mark.parametrize("clip", [0.0, CLIP])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world_size", "tensor"), [(2, 2), (4, 2), (3, 3)])
def test_parts_train_as_the_whole_does(world_size: int, tensor: int, stage: int, clip: float) -> None:
    data = world_size // tensor
    batches = make_batches(cut_net(), STEPS, 2, data, ROWS)
    reference = train_reference(cut_net(), _adam, batches, clip=clip or None, averages_each_micro_batch=stage >= 2)
    outcomes = run_ranks(_train_parts, world_size, stage, tensor, clip)
    cuts = _cuts(tensor)
    for rank, outcome in enumerate(outcomes):
        assert outcome.norms == pytest.approx(reference.norms, rel=FP64_ROUNDING)
        want = {
            name: part_of(cuts[name], rank % tensor, whole) if name in cuts else whole
            for name, whole in reference.weights.items()
        }
        assert relative_difference(outcome.weights, want) < FP64_ROUNDING


def _cuts(size: int) -> dict[str, Any]:
    model = cut_net().cut(0, size, None)
    return {f"{name}.{key}": cut for name in ("first", "second") for key, cut in getattr(model, name).cuts()}


def _train_on_other_data(rank: int, world_size: int) -> None:
    unit = TensorUnit(2)
    model: CutNet = cut_net().cut(rank, 2, unit.get_model_parallel_group())
    engine = make_engine(model, config(1, ROWS), mpu=unit, optimizer=_adam(model.parameters()))
    engine(*model.batch(ROWS, seed=rank))


def test_tensor_parallel_ranks_that_see_other_data_are_told() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_train_on_other_data, 2)
    assert len(failed.value.failures) == 2
    assert all(
        CommError.__name__ in failure.text and "different inputs" in failure.text for failure in failed.value.failures
    )


def _go_on_with_other_data(rank: int, world_size: int) -> None:
    """Alike at first; the second micro-batch of the second step differs in the last bit of one number."""
    unit = TensorUnit(2)
    model: CutNet = cut_net().cut(unit.get_model_parallel_rank(), 2, unit.get_model_parallel_group())
    engine = make_engine(model, config(2, ROWS), mpu=unit, optimizer=_adam(model.parameters()))
    for micro in range(4):
        inputs, targets = model.batch(ROWS, seed=micro)
        if micro == 3 and rank == 1:
            inputs[-1, -1] = torch.nextafter(inputs[-1, -1], torch.tensor(torch.inf, dtype=inputs.dtype))
        engine.backward(engine(inputs, targets))
        if micro < 3:
            engine.step()
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(CommError, match="different inputs"):
        engine.step()
    assert all(torch.equal(value, param) for value, param in zip(before, model.parameters(), strict=True))


def test_other_data_later_is_noticed_before_weights_change() -> None:
    run_ranks(_go_on_with_other_data, 2)


def _random_after_start(rank: int, world_size: int) -> float:
    torch.manual_seed(rank)
    unit = TensorUnit(2)
    model = cut_net().cut(unit.get_model_parallel_rank(), 2, unit.get_model_parallel_group())
    make_engine(model, config(1, ROWS), mpu=unit, optimizer=_adam(model.parameters()))
    return torch.rand(()).item()


def test_tensor_parallel_ranks_begin_with_one_generator_and_data_parallel_ones_do_not() -> None:
    found = run_ranks(_random_after_start, 4)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0] != found[2]
