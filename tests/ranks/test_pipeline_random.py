"""Layers that draw random numbers or keep statistics: as in one process, whatever the cut and whatever came between."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from deepspeed.accelerator.seeds import set_random_seed
from deepspeed.pipe.forward import pass_seed
from deepspeed.pipe.specs import LayerSpec
from tests.support.engines import config, masters, zero
from tests.support.pipelines import WIDTH, Whole, layers, make_pipeline, own, token_batches, train_pipeline
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, Reference, relative_difference, train_reference

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
STEPS, MICRO_BATCHES, BASE_SEED = 4, 4, 1234


class Noisy(nn.Module):
    """Statistics of rows, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.dropout = nn.Dropout(0.3)

    def forward(self, hidden: Tensor) -> Tensor:
        normal: Tensor = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        return hidden + self.dropout(normal)


def _described() -> list[Any]:
    described = layers(4)
    described[2:2] = [LayerSpec(Noisy)]
    described[-2:-2] = [LayerSpec(Noisy), LayerSpec(nn.Dropout, 0.2)]
    return described


class Seeded(Whole):
    """The whole model; each layer is seeded as in a pipeline, by the number of forwards that the model has seen."""

    def __init__(self) -> None:
        super().__init__(_described())
        self.passes = 0

    def logits(self, inputs: Any) -> Any:
        for layer, function in enumerate(self._functions):
            set_random_seed(pass_seed(BASE_SEED, self.passes, layer))
            inputs = function(inputs)
        self.passes += 1
        return inputs


def _reference() -> tuple[Reference, dict[str, Tensor]]:
    """What comes of training, and the statistics."""
    model = Seeded()
    trained = train_reference(model, SGD, token_batches(STEPS, MICRO_BATCHES, 1), clip=0.5)
    return trained, dict(model.named_buffers())


class Setting(NamedTuple):
    """One training."""

    stages: int
    data_ranks: int = 1
    schedule: str = "1f1b"
    interval: int = 0
    zero_stage: int = 1

    @property
    def ranks(self) -> int:
        return self.stages * self.data_ranks


SETTINGS = [
    Setting(1),
    Setting(1, interval=3),
    Setting(2, schedule="zero_bubble"),
    Setting(2, schedule="interleaved", zero_stage=0),
    Setting(2, interval=2),
    Setting(1, 2),
    Setting(3, schedule="gpipe"),
    Setting(2, 2, interval=2),
]


def _engine(setting: Setting) -> Any:
    blocks = {
        **zero(setting.zero_stage, reduce_bucket_size=100),
        "gradient_clipping": 0.5,
        "pipeline": {"schedule": setting.schedule, "activation_checkpoint_interval": setting.interval},
    }
    return make_pipeline(
        _described(),
        setting.stages,
        config(MICRO_BATCHES // setting.data_ranks, 2, **blocks),
        optimizer=SGD,
        num_chunks=2 if setting.schedule == "interleaved" else 1,
        seed_layers=True,
        base_seed=BASE_SEED,
    )


def _batches(data_ranks: int) -> list[Any]:
    """The same micro-batches, dealt out to data-parallel ranks in turn."""
    whole = [[micro_batch for (micro_batch,) in step] for step in token_batches(STEPS, MICRO_BATCHES, 1)]
    return [[step[at : at + data_ranks] for at in range(0, MICRO_BATCHES, data_ranks)] for step in whole]


def _interrupted(rank: int, _world_size: int, folder: str, settings: list[Setting]) -> None:
    for number, setting in enumerate(settings):
        reference, statistics = _reference()
        engine = _engine(setting)
        batches = _batches(setting.data_ranks)
        losses = []
        for step in range(STEPS):
            if step == STEPS // 2:  # a run that goes on in new processes
                engine.save_checkpoint(f"{folder}/{number}")
                engine.destroy()
                set_random_seed(99)
                engine = _engine(setting)
                engine.load_checkpoint(f"{folder}/{number}")
            losses += train_pipeline(engine, batches[step : step + 1])
            asked = next(own(batches[:1], engine.get_data_parallel_rank()))
            assert engine.eval_batch(iter(asked)).item() == engine.eval_batch(iter(asked)).item()
            engine.inference_batch(iter(asked), num_micro_batches=1)
        assert losses == pytest.approx(reference.losses, abs=FP64_ROUNDING), setting
        got = masters(engine)
        assert relative_difference(got, {name: reference.weights[name] for name in got}) <= FP64_ROUNDING, setting
        if setting.data_ranks == 1 and setting.interval == 0:  # replicas see other rows; recomputation counts rows twice
            kept = dict(engine.module.named_buffers())
            for name, value in kept.items():
                torch.testing.assert_close(value, statistics[name], rtol=FP64_ROUNDING, atol=FP64_ROUNDING)
            assert rank > 0 or kept
        engine.destroy()


@pytest.mark.parametrize("ranks", sorted({setting.ranks for setting in SETTINGS}))
def test_dropout_and_statistics_are_those_of_one_process_with_evaluations_and_a_restart_between(
    ranks: int, tmp_path: Path
) -> None:
    run_ranks(_interrupted, ranks, str(tmp_path), [each for each in SETTINGS if each.ranks == ranks], timeout_seconds=120)


def _by_hand(rank: int, _world_size: int) -> None:
    net = _engine(Setting(1)).module
    tokens = token_batches(1, 1, 1)[0][0][0][0]
    first, second = net(tokens), net(tokens)
    assert not torch.equal(first, second)
    again = _engine(Setting(1)).module
    set_random_seed(5)
    again.load_state_dict(net.state_dict())  # statistics play no part in training mode
    assert torch.equal(again(tokens), first)
    assert torch.equal(again(tokens), second)


def test_calls_by_hand_draw_new_numbers_each_time_and_the_same_in_every_run() -> None:
    run_ranks(_by_hand, 1)
