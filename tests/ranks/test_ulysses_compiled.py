"""Compiled models over sequence ranks train as one process does that compiles nothing; the graph breaks at the exchange."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepspeed
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.sequence.data import own_part
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.sequence.loss import mean_over_sequence
from deepspeed.sequence.registry import restore_transformers
from deepspeed.sequence.state import SequenceParallelUnit, initialize_sequence_parallel
from deepspeed.topology.groups import get_current
from deepspeed.utils import groups
from tests.support.engines import model_weights, zero
from tests.support.ranks import run_ranks
from tests.support.ulysses import batch, llama, shifted, token_loss

pytest.importorskip("transformers")

TOLERANCE = 1e-10  # double precision; sums over ranks and heads come in another order
STEPS, SAMPLES, LENGTH = 3, 2, 12


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class _Net(nn.Module):
    """A model of one's own: `attention` is plain, or over sequence ranks."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(23, 16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 23)
        self.attention = attention
        self.double()

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        hidden = self.embed(input_ids) + torch.cos(position_ids.unsqueeze(-1).double())
        query, key, value = self.qkv(hidden).unflatten(-1, (3, 4, 4)).unbind(2)
        return self.out(torch.tanh(self.attention(query, key, value)).flatten(2))


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


def _logits(output: Any) -> Tensor:
    logits: Tensor = getattr(output, "logits", output)
    return logits


def _plain(model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    optimizer, losses = _sgd(model), []
    for step in range(STEPS):
        whole = batch(LENGTH, SAMPLES, step)
        loss = token_loss(_logits(model(input_ids=whole["input_ids"], position_ids=whole["position_ids"])), shifted(whole))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


def _step(engine: Any, step: int) -> float:
    part = own_part(batch(LENGTH, SAMPLES, step), groups._get_sequence_parallel_rank(), 2)
    labels = part.pop("shift_labels")
    part.pop("labels", None)
    loss = mean_over_sequence(token_loss(_logits(engine(**part)), labels), (labels != -100).sum())
    engine.backward(loss)
    engine.step()
    return loss.item()


def _training(rank: int, world_size: int, stages: tuple[int, ...], backend: str, kind: str, by_engine: bool) -> None:
    losses, weights = _plain(llama() if kind == "transformers" else _Net(_causal))
    for stage in stages:
        torch.compiler.reset()
        settings = {"train_micro_batch_size_per_gpu": SAMPLES, **zero(stage)}
        model, mpu = _made(kind)
        given = model if by_engine else torch.compile(model, backend=backend)
        engine = deepspeed.initialize(model=given, optimizer=_sgd(model), config=settings, mpu=mpu)[0]
        if by_engine:
            engine.compile(backend=backend)
        assert [_step(engine, step) for step in range(STEPS)] == pytest.approx(losses, rel=0, abs=TOLERANCE), stage
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
        for name, weight in model_weights(engine).items():
            assert (weight - weights[name.removeprefix("_orig_mod.")]).abs().max() < TOLERANCE, (stage, name)
        engine.destroy()
        restore_transformers()


def _made(kind: str) -> tuple[nn.Module, Any]:
    if kind == "transformers":
        model = llama()
        return model, UlyssesSPAttentionHF.register_with_transformers(model, None, 2, SAMPLES)
    initialize_sequence_parallel(2)
    attention = DistributedAttention(_causal, groups._get_sequence_parallel_group())
    return _Net(attention), SequenceParallelUnit(get_current())


@pytest.mark.parametrize(
    ("kind", "by_engine", "backend", "stages"),
    [
        ("transformers", True, "aot_eager", (0, 3)),
        ("transformers", True, "eager", (1, 2)),
        ("transformers", False, "eager", (0, 3)),
        ("own", True, "aot_eager", (0, 1, 2, 3)),
        ("own", False, "aot_eager", (0, 3)),
    ],
)
def test_a_compiled_model_over_parts_trains_as_one_process_does(
    kind: str, by_engine: bool, backend: str, stages: tuple[int, ...]
) -> None:
    run_ranks(_training, 2, stages, backend, kind, by_engine, timeout_seconds=150)
