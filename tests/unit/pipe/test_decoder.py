"""Decoders taken apart by their structure compute what the whole does, bit by bit, or are refused."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.errors import PipelineError
from deepspeed.pipe import TiedLayerSpec, causal_lm_loss, to_layers
from tests.support.decoders import VOCABULARY, Gpt2, Llama


def _run(layers: list[Any], inputs: Any) -> torch.Tensor:
    copies: dict[str, nn.Module] = {}
    for layer in layers:
        if isinstance(layer, TiedLayerSpec):
            inputs = layer.bind(copies.setdefault(layer.key, layer.build()))(inputs)
        else:
            inputs = layer(inputs)
    return inputs


def _tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (3, 10), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    "model",
    [
        Llama(),
        Llama("eager"),
        Llama("sdpa", window=4),
        Llama("eager", window=3, kinds=["full_attention", "sliding_attention", "full_attention"]),
    ],
)
def test_a_decoder_with_rotary_positions_gives_the_same_logits_as_its_layers(model: Llama) -> None:
    layers = to_layers(model)
    assert len(layers) == 6
    assert model.training
    torch.testing.assert_close(_run(layers, _tokens()), model(_tokens()).logits, rtol=0, atol=0)


def test_an_attention_mask_goes_through_all_blocks() -> None:
    model, mask = Llama(), torch.ones(3, 10, dtype=torch.long)
    mask[1, 7:] = 0
    expected = model(_tokens(), mask).logits
    torch.testing.assert_close(_run(to_layers(model), (_tokens(), mask)), expected, rtol=0, atol=0)
    assert not torch.equal(expected[1, 7:], model(_tokens()).logits[1, 7:])


def test_an_embedding_that_is_the_head_becomes_one_tied_module() -> None:
    model = Gpt2().eval()
    layers = to_layers(model)
    first, last = layers[0], layers[-1]
    assert isinstance(first, TiedLayerSpec)
    assert isinstance(last, TiedLayerSpec)
    assert (first.key, first.tied_weight_attr) == (last.key, last.tied_weight_attr) == ("embed", ["tokens.weight"])
    torch.testing.assert_close(_run(layers, _tokens()), model(_tokens()), rtol=0, atol=0)
    names = {name for name, _ in first.build().named_parameters()}
    assert names == {"tokens.weight", "positions.weight", "head_bias"}


def test_the_layers_hold_the_parameters_of_the_model() -> None:
    model = Llama()
    held = {id(param) for layer in to_layers(model) if isinstance(layer, nn.Module) for param in layer.parameters()}
    assert held == {id(param) for param in model.parameters()}


def test_a_model_that_does_more_than_its_layers_is_refused() -> None:
    with pytest.raises(PipelineError, match=r"the layers of Gpt2 give logits that differ .* by 0\.01"):
        to_layers(Gpt2(scale=1 / 1.01))
    assert len(to_layers(Gpt2(scale=2), verify=False)) == 5


def test_a_model_of_another_structure_is_refused_with_what_it_has() -> None:
    with pytest.raises(PipelineError, match=r"Sequential has none of model, transformer, gpt_neox.* It has: 0, 1\."):
        to_layers(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    with pytest.raises(PipelineError, match="block 1 has attention of the kind 'linear_attention'"):
        to_layers(Llama(kinds=["full_attention", "linear_attention", "full_attention"]))
    model = Llama()
    model.model.rotary_emb = nn.Identity()
    model.forward = Gpt2().forward  # type: ignore[method-assign]
    with pytest.raises(PipelineError, match="layer 1 of Llama cannot run by itself: TypeError"):
        to_layers(model)


def test_the_loss_is_that_of_the_next_token() -> None:
    logits, labels = torch.randn(2, 4, VOCABULARY, dtype=torch.bfloat16), torch.tensor([[1, 2, 3, -100], [4, 5, -100, 6]])
    found = causal_lm_loss(logits, labels)
    wanted = [-logits[b, t].float().log_softmax(-1)[labels[b, t + 1]] for b, t in ((0, 0), (0, 1), (1, 0), (1, 2))]
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, torch.stack(wanted).mean())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3", "GPT2", "GPTNeoX"])
def test_models_of_transformers_give_the_same_logits_as_their_layers(kind: str, attention: str) -> None:
    transformers = importlib.import_module("transformers")  # seconds
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    sizes |= {"intermediate_size": 24, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    sizes |= {"sliding_window": 4} if kind in ("Mistral", "Qwen2") else {}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()
    expected = model(_tokens(), labels=_tokens(), use_cache=False)  # a cache lays keys out otherwise: other last bits
    logits = _run(to_layers(model), _tokens())
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=0)
    torch.testing.assert_close(causal_lm_loss(logits, _tokens()), expected.loss)
