"""`deepspeed.plan`: from what the user has to a `Comparison`. Pure: a number of parameters loads no torch.

    a number      --> `formula`      the paper's formula
    anything else --> `of_module`    the model itself, without memory; it takes torch

Called by `deepspeed.plan` and by `command`. Does not live here: what is compared (`comparison`).
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

from deepspeed.config import load_config
from deepspeed.planning.comparison import NOT_TRACED, Asked, Comparison, compared, with_batch
from deepspeed.planning.formula import OfSize

__all__ = ["plan"]


def plan(
    model_or_config: Any,
    ds_config: Any,
    world_size: int,
    device_memory: float | None = None,
    *,
    sequence_length: int | None = None,
    batch: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    device_type: str = "cuda",
) -> Comparison:
    """Say what each rank would hold and send, before anything is allocated.

    Args:
        model_or_config: a module (values are not read), a Hugging Face configuration (object, name, folder, file), a
            function that builds a model, or its name "module:function", or a number of parameters. A `PipelineModule` needs
            such a function: it builds each stage in turn.
        ds_config: as `deepspeed.initialize` takes it; batch sizes that are left out or "auto" count as
            1 micro-batch of 1 row.
        world_size: ranks.
        device_memory: bytes of one device; None: nothing is said about fitting.
        sequence_length: tokens of a row, for Hugging Face language models.
        batch: arguments of forward `(args, kwargs)` for one micro-batch of one rank, of a pipeline `((inputs, labels), {})`;
            without it activations of other models are left out.
        device_type: of the devices. On "cpu" host memory is the device's, so that a tier "cpu" moves nothing.

    Raises:
        ConfigError: the configuration does not start.
        ArgumentError: the model cannot be read, or cannot be spread over the ranks as the configuration asks.
    """
    asked = Asked(with_batch(load_config(ds_config)), world_size, device_type)
    if isinstance(model_or_config, int | float):
        found = _of_size(int(model_or_config), asked)
    else:
        of_module: Any = importlib.import_module("deepspeed.planning.of_module")  # torch, which a number does without
        found = of_module.plan_module(model_or_config, asked, sequence_length, batch)
    return replace(found, device_nbytes=device_memory)


def _of_size(numel: int, asked: Asked) -> Comparison:
    config, ranks = asked.config()
    found = compared([OfSize(-(-numel // ranks.tensor), ranks, asked.device_type)], asked, config, (NOT_TRACED,))
    return replace(found, subject="a model of this size", numel=numel)
