"""Models that are built under `zero.Init` train over sequence ranks as one process does."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.sequence.data import own_part
from deepspeed.sequence.loss import mean_over_sequence
from deepspeed.sequence.registry import restore_transformers
from deepspeed.utils import groups
from tests.support.engines import model_weights, zero
from tests.support.ranks import run_ranks
from tests.support.ulysses import batch, llama, shifted, token_loss

pytest.importorskip("transformers")

TOLERANCE = 1e-10  # double precision; sums over ranks and heads come in another order
STEPS, SAMPLES, LENGTH, SEQUENCE = 4, 2, 13, 2


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _batch(step: int, data_rank: int) -> dict[str, Tensor]:
    return batch(LENGTH, SAMPLES, 10 * step + data_rank)


def _plain(data_ranks: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses by step and data rank, and the weights."""
    model = llama()
    optimizer, losses = _sgd(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        seen = []
        for data_rank in range(data_ranks):
            whole = _batch(step, data_rank)
            logits = model(input_ids=whole["input_ids"], position_ids=whole["position_ids"]).logits
            loss = token_loss(logits, shifted(whole))
            (loss / data_ranks).backward()
            seen.append(loss.item())
        optimizer.step()
        losses.append(seen)
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


def _context(given: str, mpu: Any, settings: dict[str, Any]) -> AbstractContextManager[Any]:
    arguments: dict[str, Any] = {
        "group": {"sequence_data_parallel_group": mpu.get_sequence_data_parallel_group()},
        "mpu": {"mpu": mpu},
        "data group": {"data_parallel_group": mpu.get_data_parallel_group()},
        "nothing": {},
    }[given]
    return deepspeed.zero.Init(config_dict_or_path=settings, **arguments)


def _training(rank: int, world_size: int, given: str) -> list[int]:
    data_ranks, data_rank = world_size // SEQUENCE, rank // SEQUENCE
    losses, weights = _plain(data_ranks)
    settings = {"train_micro_batch_size_per_gpu": SAMPLES, "sequence_parallel_size": SEQUENCE, **zero(3)}
    mpu = UlyssesSPAttentionHF.register_with_transformers(llama(), None, SEQUENCE, SAMPLES)
    with _context(given, mpu, settings):
        model = llama()
    sharers = {len(deepspeed.comm.get_all_ranks_from_group(param.ds_process_group)) for param in model.parameters()}
    engine = deepspeed.initialize(model=model, optimizer=_sgd(model), config=settings, mpu=mpu)[0]
    for step in range(STEPS):
        part = own_part(_batch(step, data_rank), groups._get_sequence_parallel_rank(), SEQUENCE)
        labels = part.pop("shift_labels")
        loss = mean_over_sequence(token_loss(engine(**part).logits, labels), (labels != -100).sum())
        engine.backward(loss)
        engine.step()
        assert loss.item() == pytest.approx(losses[step][data_rank], rel=0, abs=TOLERANCE), step
    for name, weight in model_weights(engine).items():
        assert (weight - weights[name]).abs().max() < TOLERANCE, name
    restore_transformers()
    return sorted(sharers)


@pytest.mark.parametrize("given", ["group", "mpu", "data group", "nothing"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_model_built_sharded_trains_over_parts_as_one_process_does(world_size: int, given: str) -> None:
    sharers = run_ranks(_training, world_size, given)
    assert sharers == [[world_size // SEQUENCE if given == "data group" else world_size]] * world_size
