"""What layers weigh, without keeping or changing anything."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.errors import PipelineError
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.pipe.weights import count_parameters, measure_seconds


class _Seen(nn.Module):
    def __init__(self, seen: list[str], needs_values: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))
        seen.append(self.weight.device.type)
        if needs_values:
            self.scale = self.weight.sum().item()


def test_parameters_are_counted_on_the_meta_device_without_drawing_numbers() -> None:
    seen: list[str] = []
    before = torch.get_rng_state()
    layers = [LayerSpec(_Seen, seen), TiedLayerSpec("t", nn.Linear, 2, 3), nn.Linear(2, 1), torch.tanh]
    drawn = torch.get_rng_state()
    assert not torch.equal(before, drawn)  # by the layer that is built already
    assert count_parameters(layers) == [3, 9, 3, 0]
    assert seen == ["meta"]
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_layer_that_reads_values_when_it_is_built_is_counted_all_the_same() -> None:
    seen: list[str] = []
    before = torch.get_rng_state()
    assert count_parameters([LayerSpec(_Seen, seen, needs_values=True)]) == [3]
    assert seen == ["meta", "cpu"]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_fastest_of_several_runs_counts_and_outputs_go_on_to_the_next_layer() -> None:
    times = itertools.chain.from_iterable((0.0, seconds) for seconds in (3, 2, 4, 30, 10, 20, 0.5, 0.6, 0.7))
    widths: list[tuple[int, ...]] = []

    def record(hidden: torch.Tensor) -> torch.Tensor:
        widths.append(tuple(hidden.shape))
        return hidden

    linear = nn.Linear(4, 2)
    layers: list[Any] = [LayerSpec(nn.Linear, 3, 4), linear, record]
    before = torch.get_rng_state()
    assert measure_seconds(layers, torch.ones(5, 3), clock=lambda: float(next(times))) == [2, 10, 0.5]
    assert set(widths) == {(5, 2)}
    assert linear.weight.grad is None
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tied_layer_is_measured_with_the_module_of_its_key() -> None:
    built: list[str] = []
    spec = TiedLayerSpec("t", _Seen, built, forward_fn=lambda module, hidden: hidden + module.weight)
    assert len(measure_seconds([spec, spec], torch.ones(3), repeats=1)) == 2
    assert built == ["cpu"]


def test_a_layer_that_cannot_take_the_example_is_named() -> None:
    with pytest.raises(PipelineError, match=r"layer 1 failed on the example: RuntimeError: .* Give profile_input"):
        measure_seconds([LayerSpec(nn.Linear, 3, 4), LayerSpec(nn.Linear, 3, 4)], torch.ones(1, 3))
