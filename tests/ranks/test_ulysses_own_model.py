"""A model of one's own around DistributedAttention, over the sequence ranks that the config's keys ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepspeed
from deepspeed.runtime.sequence_parallel.parallel_state_sp import (
    get_sequence_parallel_group,
    get_sequence_parallel_rank,
    initialize_sequence_parallel,
)
from deepspeed.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy
from deepspeed.sequence.layer import DistributedAttention
from tests.support.engines import model_weights, zero
from tests.support.ranks import run_ranks

HEADS, SIZE, VOCABULARY, TOKENS, STEPS = 3, 4, 11, 8, 6
TOLERANCE = 1e-10  # double precision; sums over ranks and heads come in another order


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Over (tokens, batch, heads, size); merges heads, as Megatron's attention does."""
    query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).permute(2, 0, 1, 3).flatten(-2)


class _Net(nn.Module):
    def __init__(self, attention: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(VOCABULARY, HEADS * SIZE)
        self.qkv = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE)
        self.out = nn.Linear(HEADS * SIZE, VOCABULARY)
        self.attention = attention
        self.double()

    def forward(self, tokens_TB: Tensor) -> Tensor:
        qkv = self.qkv(self.embed(tokens_TB)).unflatten(-1, (3, HEADS, SIZE))
        logits_TBV: Tensor = self.out(self.attention(*qkv.unbind(2)))
        return logits_TBV


class _Parts(nn.Module):
    """The same attention, over sequence ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = DistributedAttention(_causal, get_sequence_parallel_group())

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        context: Tensor = self.layer(query, key, value, 1)
        return context


def _data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(VOCABULARY, (2, TOKENS, 2), generator=generator)
    return tokens, labels


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _training(rank: int, world_size: int, stage: int) -> tuple[list[float], dict[str, Tensor]]:
    initialize_sequence_parallel(2)
    model = _Net(_Parts())
    settings = {"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2, "data_parallel_size": 1, **zero(stage)}
    engine = deepspeed.initialize(model=model, optimizer=_sgd(model), config=settings)[0]
    half = TOKENS // 2
    own = slice(get_sequence_parallel_rank() * half, (get_sequence_parallel_rank() + 1) * half)
    losses = []
    for step in range(STEPS):
        tokens, labels = _data(step)
        loss = vocab_sequence_parallel_cross_entropy(engine(tokens[own]), labels[own], get_sequence_parallel_group()).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, model_weights(engine)


@pytest.mark.parametrize("stage", [0, 3])
def test_megatrons_loss_and_layout_train_as_one_process_does(stage: int) -> None:
    model = _Net(_causal)
    optimizer = _sgd(model)
    expected = []
    for step in range(STEPS):
        tokens, labels = _data(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses, weights in run_ranks(_training, 2, stage):
        assert losses == pytest.approx(expected, rel=0, abs=TOLERANCE)
        for name, param in model.named_parameters():
            torch.testing.assert_close(weights[name], param.detach(), rtol=0, atol=TOLERANCE)
