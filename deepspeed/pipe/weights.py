"""What each layer of a list weighs, for cutting the list: parameters, matches of a name, or measured seconds.

Lives here: looking at layers without keeping them. Does not live here: the cut (`partition`). Called by `module`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.common.pytree import move_to_device
from deepspeed.errors import PipelineError
from deepspeed.pipe.specs import Layer, LayerSpec, TiedLayerSpec

__all__ = ["count_parameters", "measure_seconds"]


def count_parameters(layers: Sequence[Layer]) -> list[int]:
    """Number of elements of each layer's parameters; a tied layer counts wherever it occurs, since each stage has a copy.

    What is not built yet is built on the meta device, which takes neither memory nor random numbers.
    """
    return [sum(param.numel() for param in _parameters_of(layer)) for layer in layers]


def _parameters_of(layer: Layer) -> list[nn.Parameter]:
    if isinstance(layer, LayerSpec):
        return list(_build_to_look_at(layer).parameters())
    return list(layer.parameters()) if isinstance(layer, nn.Module) else []


def _build_to_look_at(spec: LayerSpec) -> nn.Module:
    with _random_state_kept():
        try:
            with torch.device("meta"):
                return spec.build()
        except (NotImplementedError, RuntimeError, TypeError):  # a constructor that reads values cannot do without them
            return spec.build()


def measure_seconds(
    layers: Sequence[Layer], example: Any, *, repeats: int = 3, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Time the forward of each layer on one micro-batch, the fastest of `repeats` runs; one layer is built at a time.

    The backward takes about twice as long in every layer, so the cut is the same. Layers that are built already are moved to
    the current device for the measurement and back.

    Args:
        layers: the whole list.
        example: input of the first layer.
        repeats: runs of each layer after one that is not timed.
        clock: returns seconds.

    Raises:
        PipelineError: a layer does not take what the one before it gave; the text names it.
    """
    device = get_accelerator().current_device_name()
    tied: dict[str, nn.Module] = {}
    seconds = []
    with _random_state_kept(), torch.no_grad():
        inputs = move_to_device(example, torch.device(device))
        for index, layer in enumerate(layers):
            try:
                with _callable_on(layer, device, tied) as call:
                    taken, inputs = _fastest(call, inputs, repeats, clock)
            except Exception as error:  # of the user's layer, whatever it is
                raise PipelineError(
                    f"partition_method='profile': layer {index} failed on the example: {type(error).__name__}: {error}. "
                    "Give profile_input as the first layer gets it."
                ) from error
            seconds.append(taken)
    return seconds


@contextmanager
def _callable_on(layer: Layer, device: str, tied: dict[str, nn.Module]) -> Iterator[Callable[[Any], Any]]:
    if isinstance(layer, TiedLayerSpec):
        if layer.key not in tied:
            tied[layer.key] = layer.build().to(device)
        yield layer.bind(tied[layer.key])
    elif isinstance(layer, LayerSpec):
        yield layer.build().to(device)
    elif isinstance(layer, nn.Module):
        home = next((param.device for param in layer.parameters()), torch.device(device))
        yield layer.to(device)
        layer.to(home)
    else:
        yield layer


def _fastest(call: Callable[[Any], Any], inputs: Any, repeats: int, clock: Callable[[], float]) -> tuple[float, Any]:
    outputs = call(inputs)
    taken = []
    for _ in range(repeats):
        get_accelerator().synchronize()
        began = clock()
        outputs = call(inputs)
        get_accelerator().synchronize()
        taken.append(clock() - began)
    return min(taken), outputs


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Give torch's generators back as they were, so that looking at layers changes no weight that is drawn later."""
    accelerator = get_accelerator()
    is_cpu = accelerator.device_name() == "cpu"
    host, device = torch.get_rng_state(), None if is_cpu else accelerator.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if device is not None:
            accelerator.set_rng_state(device)
