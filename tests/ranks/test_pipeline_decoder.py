"""A decoder of Hugging Face's structure, taken apart and trained in two stages, is the one that plain torch trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.pipe import PipelineModule, TiedLayerSpec, causal_lm_loss, to_layers
from tests.support.decoders import VOCABULARY, Gpt2, Llama
from tests.support.engines import config
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING

STEPS, MICRO_BATCHES, RATE = 3, 4, 0.5


def _model(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return (Gpt2(dropout=0.0) if kind == "gpt2" else Llama(window=3)).double()


def _batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCABULARY, (2, 6), generator=generator) for _ in range(STEPS * MICRO_BATCHES)]


def _train(rank: int, world_size: int, kind: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    net = PipelineModule(to_layers(_model(kind)), num_stages=2, loss_fn=causal_lm_loss)
    settings = config(MICRO_BATCHES, rows=2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=RATE), config=settings)
    batches = iter([(tokens, tokens) for tokens in _batches()])
    losses = [float(engine.train_batch(data_iter=batches)) for _ in range(STEPS)]
    return dict(net.state_dict()), losses


def _reference(kind: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train the whole model; its weights under the names of the pipeline."""
    model, losses = _model(kind), []
    layers = to_layers(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    batches = iter(_batches())
    for _ in range(STEPS):
        outputs = [(model(tokens), tokens) for tokens in (next(batches) for _ in range(MICRO_BATCHES))]
        loss = sum(causal_lm_loss(getattr(out, "logits", out), tokens) for out, tokens in outputs) / MICRO_BATCHES
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    values = {}
    for index, layer in enumerate(layers):
        module = layer.build() if isinstance(layer, TiedLayerSpec) else layer
        prefix = f"tied_modules.{layer.key}" if isinstance(layer, TiedLayerSpec) else str(index)
        assert isinstance(module, nn.Module)
        values.update({f"{prefix}.{name}": value for name, value in module.state_dict().items()})
    return values, losses


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_decoder_in_two_stages_trains_as_the_whole_does(kind: str) -> None:
    values, losses = _reference(kind)
    found = run_ranks(_train, 2, kind)
    assert {name for weights, _ in found for name in weights} == values.keys()
    for weights, seen in found:
        assert seen == pytest.approx(losses, rel=1e-6)  # the loss is told in float32
        for name, value in weights.items():
            torch.testing.assert_close(value, values[name], rtol=0, atol=FP64_ROUNDING)
