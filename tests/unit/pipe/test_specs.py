"""Layers that are described first and built later."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from deepspeed.errors import PipelineError
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.pipe.specs import layer_name


def test_a_described_layer_is_built_from_its_arguments_each_time_anew() -> None:
    spec = LayerSpec(nn.Linear, 2, 3, bias=False)
    first, second = spec.build(), spec.build()
    assert first is not second
    assert isinstance(first, nn.Linear)
    assert (first.in_features, first.out_features, first.bias) == (2, 3, None)
    assert repr(spec) == "LayerSpec(Linear: 2, 3, bias=False)"


def test_building_is_settled_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="DeepSpeed"):
        LayerSpec(nn.Linear, 2, 3).build()
        LayerSpec(nn.Linear, 4, 5).build(log=True)
    assert [record.getMessage() for record in caplog.records] == ["building LayerSpec(Linear: 4, 5)"]


@pytest.mark.parametrize("wrong", [nn.Linear(2, 2), torch.tanh, int])
def test_what_is_no_class_of_modules_is_refused(wrong: object) -> None:
    with pytest.raises(PipelineError, match=r"needs a subclass of torch\.nn\.Module"):
        LayerSpec(wrong)  # type: ignore[arg-type]


def test_a_tied_layer_names_its_weights_and_calls_its_own_function() -> None:
    spec = TiedLayerSpec("embed", nn.Embedding, 5, 2, forward_fn=lambda module, hidden: hidden @ module.weight.t())
    assert (spec.key, spec.tied_weight_attr) == ("embed", ["weight"])
    assert TiedLayerSpec("embed", nn.Embedding, 5, 2, tied_weight_attr="a.weight").tied_weight_attr == ["a.weight"]
    module, hidden = spec.build(), torch.ones(3, 2)
    torch.testing.assert_close(spec.bind(module)(hidden), hidden @ module.weight.t())
    assert TiedLayerSpec("embed", nn.Embedding, 5, 2).bind(module) is module


def test_layers_are_known_by_their_class_or_function() -> None:
    layers = [LayerSpec(nn.Linear, 1, 1), TiedLayerSpec("k", nn.Embedding, 1, 1), nn.Tanh(), torch.relu, lambda x: x]
    assert [layer_name(layer) for layer in layers] == ["Linear", "Embedding", "Tanh", "relu", "<lambda>"]
