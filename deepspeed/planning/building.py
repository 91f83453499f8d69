"""Models that a function builds: on the meta device, and as one of as many ranks as the plan is for.

    "module:function", or the function      returns a model, or (model, args, kwargs) with arguments of forward
        a PipelineModule                    is built once for each stage, by that stage's first rank; its arguments are what
                                            the data iterator gives for one micro-batch: (model, (inputs, labels), {})

Called by `of_module` and `pipelines`. Does not live here: other sources (`sources`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed import comm
from deepspeed.comm.pretended import pretended_world
from deepspeed.errors import ArgumentError
from deepspeed.pipe.module import PipelineModule
from deepspeed.planning.tracing import Batch

__all__ = ["Build", "Built", "build_on", "each_stage", "function_of"]

Build = Callable[[], Any]


class Built(NamedTuple):
    """What a function has built."""

    module: nn.Module
    batch: Batch | None
    """None: it gave no arguments."""


def function_of(source: Any) -> Build | None:
    """The function that a source is or names; None: it is another source.

    Raises:
        ArgumentError: it names one that is not there.
    """
    if isinstance(source, str | Path):
        return _named(str(source)) if ":" in str(source) and not Path(source).exists() else None
    if isinstance(source, PipelineModule) and source.num_stages > 1:
        raise ArgumentError(
            f"a PipelineModule of {source.num_stages} stages was given, and it has the layers of stage {source.stage_id} "
            "alone. Give the function that builds it (or module:function): each stage is built in turn."
        )
    if isinstance(source, PipelineModule):
        return lambda: source
    is_function = callable(source) and not isinstance(source, nn.Module)
    return source if is_function else None


def _named(path: str) -> Build:
    module_name, _, function = path.partition(":")
    try:
        found: Build = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as cause:
        raise ArgumentError(
            f"{path!r} was taken for module:function, but: {cause}. Run the command where the module can be imported "
            "(PYTHONPATH=. helps), or give a folder with a config.json."
        ) from cause
    return found


@contextmanager
def build_on(build: Build, world_size: int, rank: int = 0) -> Iterator[Built]:
    """What `build` gives to one of `world_size` ranks; inside, there are such ranks, unless this is a rank of a job."""
    with _ranks(world_size, rank):
        with torch.device("meta"):
            found = build()
        yield Built(found[0], (tuple(found[1]), dict(found[2]))) if isinstance(found, tuple) else Built(found, None)


@contextmanager
def _ranks(world_size: int, rank: int) -> Iterator[None]:
    if comm.is_initialized():
        yield
    else:
        with pretended_world(world_size, rank):
            yield


def each_stage(build: Build, first: PipelineModule, world_size: int) -> Iterator[Built]:
    """The stages one after the other, each as its first rank builds it; between two of them, that rank is this process.

    Args:
        build: makes a `PipelineModule`.
        first: what it made for the first rank.
        world_size: ranks.
    """
    for stage in range(first.num_stages):
        with build_on(build, world_size, first.mpu().stage_to_global(stage)) as built:
            yield built
