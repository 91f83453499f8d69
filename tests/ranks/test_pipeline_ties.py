"""Modules that several stages hold: one process's numbers in 16 bits with an overflow, and buffers that stay together."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.errors import PipelineError
from deepspeed.pipe.specs import TiedLayerSpec
from tests.support.engines import config, masters, zero
from tests.support.pipelines import Embed, Whole, layers, make_pipeline, own, project, token_batches, train_pipeline
from tests.support.ranks import run_ranks
from tests.support.reference import train_reference

RATE, STEPS, SPOILED = 0.05, 6, 2
SGD = functools.partial(torch.optim.SGD, lr=RATE, momentum=0.9)
SPOILING_TOKEN = 10


class Spoiled(Embed):
    """Its gradient is infinite where a row is all of one token."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = super().forward(tokens)
        if bool((tokens[0] == SPOILING_TOKEN).all()):
            hidden.register_hook(lambda gradient: gradient * float("inf"))
        return hidden


def _described() -> list[Any]:
    described = layers(3, dtype=torch.float32)
    described[0] = TiedLayerSpec("embed", Spoiled, 90, torch.float32)
    described[-1] = TiedLayerSpec("embed", Spoiled, 90, torch.float32, forward_fn=project)
    return described


def _overflow_beside_ties(rank: int, world_size: int, stages: int) -> None:
    data_ranks = world_size // stages
    batches = token_batches(STEPS, 2, data_ranks)
    good = [step for number, step in enumerate(batches) if number != SPOILED]
    reference = train_reference(Whole(_described()), SGD, good, clip=0.3, dtype=torch.float16, loss_scale=64.0)
    tokens, labels = batches[SPOILED][1][-1]
    batches[SPOILED][1][-1] = (torch.full_like(tokens, SPOILING_TOKEN), labels)  # the first stage's copy, on one replica

    blocks = {**zero(1, reduce_bucket_size=100), "fp16": {"enabled": True, "initial_scale_power": 6, "hysteresis": 1}}
    engine = make_pipeline(_described(), stages, config(2, 2, gradient_clipping=0.3, **blocks), optimizer=SGD)
    losses, scales = [], []
    for step in own(batches, engine.get_data_parallel_rank()):
        losses.append(engine.train_batch(iter(step)).item())
        scales.append(engine.optimizer.loss_scale)
    assert engine.skipped_steps == 1
    assert scales == [64.0] * SPOILED + [32.0] * (STEPS - SPOILED)

    # As for bf16 in test_pipeline_training: in each step at most one last place of a gradient that is no larger than 1.
    tolerance = STEPS * RATE / (1 - 0.9) * torch.finfo(torch.float16).eps
    del losses[SPOILED]
    assert losses == pytest.approx(reference.losses, rel=tolerance)
    largest = max(float(value.abs().max()) for value in reference.weights.values())
    for name, got in masters(engine).items():
        torch.testing.assert_close(got, reference.weights[name], rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 2), (4, 2), (3, 3)])
def test_an_overflow_beside_a_tie_in_16_bits_is_one_processs(ranks: int, stages: int) -> None:
    run_ranks(_overflow_beside_ties, ranks, stages)


# -- buffers --------------------------------------------------------------------------------------------------------------


class Watchful(Embed):
    """Counts its uses, and what it saw; the first is state, the second is not."""

    uses: Tensor
    scratch: Tensor

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__(seed, dtype)
        self.register_buffer("uses", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.note(0, tokens.shape[1])
        return super().forward(tokens)

    def note(self, use: int, length: int) -> None:
        if self.training:
            self.uses[use] += 1
            self.scratch = torch.zeros(length + use)


def _look(module: Watchful, hidden: Tensor) -> Tensor:
    module.note(1, hidden.shape[1])
    return project(module, hidden)


def _watchful(**options: Any) -> Any:
    described = layers(3)
    described[0] = TiedLayerSpec("embed", Watchful, 90, torch.float64)
    described[-1] = TiedLayerSpec("embed", Watchful, 90, torch.float64, forward_fn=_look)
    return make_pipeline(described, 2, config(3, 2), optimizer=SGD, **options)


def _buffers(rank: int, world_size: int) -> tuple[list[int], list[int], list[int]]:
    engine = _watchful()
    tied = engine.module.tied_modules["embed"]
    train_pipeline(engine, token_batches(2, 3, world_size // 2))
    trained = tied.uses.tolist()
    if rank >= world_size // 2:
        tied.uses[1] = 100  # by hand, on the copies alone
    engine.eval_batch(iter(next(own(token_batches(1, 3, 1), 0))))
    return trained, tied.uses.tolist(), list(tied.scratch.shape)


@pytest.mark.parametrize("ranks", [2, 4])
def test_buffers_of_a_tied_module_are_the_first_stages_after_every_batch(ranks: int) -> None:
    for rank, (trained, evaluated, scratch) in enumerate(run_ranks(_buffers, ranks)):
        assert trained == evaluated == [6, 0], "six micro-batches; what the other stage counted is dropped"
        assert scratch == [5 if rank < ranks // 2 else 6], "no state of the model: each stage's own"


def _grown(rank: int, _world_size: int) -> str:
    engine = _watchful()
    if rank == 1:
        engine.module.tied_modules["embed"].uses = torch.zeros(5, dtype=torch.int64)
    with pytest.raises(PipelineError) as caught:
        train_pipeline(engine, token_batches(1, 3, 1))
    return str(caught.value)


def test_buffers_of_a_tied_module_that_come_to_differ_in_shape_are_refused_on_all_stages() -> None:
    for text in run_ranks(_grown, 2, env={"DEEPSPEED_WATCH_SECONDS": "0.8"}):
        assert "failed in the end of the batch: PipelineError: buffers of the tied module 'embed'" in text
        assert "persistent=False" in text
