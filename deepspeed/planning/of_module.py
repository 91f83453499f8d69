"""Plans where there is a model: its layout, and a trace of what it is given.

    subject   --> shared over ranks (`cutting`)            --> one timeline (`tracing`)        --> `planner`
    pipeline  --> each stage (`pipelines`)                 --> one timeline each (`stages`)    --> a `planner` each

Called by `planned`. Does not live here: which settings (`comparison`), reading what was given (`sources`, `building`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.experts import moe_layers
from deepspeed.errors import ArgumentError
from deepspeed.pipe.module import PipelineModule
from deepspeed.planning.building import Build, build_on, function_of
from deepspeed.planning.comparison import NOT_TRACED, Asked, Comparison, compared
from deepspeed.planning.cutting import as_first_rank
from deepspeed.planning.pipelines import stages_planned
from deepspeed.planning.planner import Planner
from deepspeed.planning.sequences import exchanged
from deepspeed.planning.sources import Subject, subject_of
from deepspeed.planning.states import Optimizers
from deepspeed.planning.timeline import Timeline
from deepspeed.planning.tracing import Batch, trace_pass
from deepspeed.precision.policy import DtypePolicy, exact_batch_norm

__all__ = ["plan_module"]

_SWITCHES = ("activation_checkpointing", "gradient_checkpointing")  # of Hugging Face models, the newer name first


def plan_module(source: Any, asked: Asked, sequence_length: int | None, batch: Batch | None) -> Comparison:
    """Compare settings for a model.

    Args:
        source: any that `deepspeed.plan` takes, but a number.
        asked: the configuration and its ranks.
        sequence_length: tokens of a row; None: what the model allows, at most 2,048.
        batch: of one micro-batch; None: made where the inputs are known, or what a function gives.

    Raises:
        ConfigError: the configuration does not start.
        ArgumentError: the model cannot be read, or cannot be spread over the ranks as the configuration asks.
    """
    build = function_of(source)
    if build is None:
        return _of_model(source, batch, asked, sequence_length)
    with build_on(build, asked.world_size) as built:
        module, given = built.module, batch or built.batch
    if isinstance(module, PipelineModule):
        of_stages = replace(asked, pipe=module.num_stages, tensor=module.mesh.sizes["tensor"])
        return _of_pipeline(build, module, given, of_stages)
    return _of_model(module, given, asked, sequence_length)


def _of_model(source: Any, batch: Batch | None, asked: Asked, sequence_length: int | None) -> Comparison:
    config, ranks = asked.config()
    sequence = config.sequence_parallel_size
    subject = subject_of(source, config.train_micro_batch_size_per_gpu, sequence_length, batch, sequence_ranks=sequence)
    with as_first_rank(subject, config, ranks) as on_rank:
        module = on_rank.module
        with exact_batch_norm(module):
            timeline, recomputed, notes = _timelines(on_rank, config)
            if timeline is not None and any(moe_layers(module)):
                notes += ("routers are taken for balanced: every expert gets equally many tokens.",)
            inputs = 0 if timeline is None else _nbytes_of(on_rank.batch)
            shared = exchanged(module, on_rank.batch, DtypePolicy.from_config(config, "cpu"), sequence)
            planner = Planner(on_rank, ranks, timeline, Optimizers(module), asked.device_type, inputs, exchanged=shared)
            found = compared([planner], asked, config, notes)
    less = recomputed.peak_nbytes if recomputed is not None else None
    return replace(found, subject=subject.name, numel=subject.numel, recomputed_nbytes=less)


def _of_pipeline(build: Build, first: PipelineModule, batch: Batch | None, asked: Asked) -> Comparison:
    config, ranks = asked.config()
    stages = stages_planned(build, first, batch, config, ranks, asked.device_type)
    found = compared(stages.planners, asked, config, stages.notes)
    each = tuple(
        planner.plan(f"stage {number} of {first.num_stages}", config) for number, planner in enumerate(stages.planners)
    )
    return replace(found, subject=type(first).__name__, numel=stages.numel, stages=each)


def _nbytes_of(batch: Batch | None) -> int:
    return sum(each.numel() * each.element_size() for each in tree_leaves(batch) if isinstance(each, Tensor))


def _timelines(subject: Subject, config: DeepSpeedConfig) -> tuple[Timeline | None, Timeline | None, tuple[str, ...]]:
    """Without and with recomputation, and what has to be said about them."""
    module, batch = subject.module, subject.batch
    if batch is None:
        return None, None, (NOT_TRACED,)
    policy = DtypePolicy.from_config(config, "cpu")
    try:
        plain = trace_pass(module, batch, policy)
    except ArgumentError as error:
        if subject.is_batch_given:
            raise
        return None, None, (f"activations are not counted: {error}",)
    switch = next((each for each in _SWITCHES if hasattr(module, f"{each}_enable")), None)
    if switch is None or getattr(module, f"is_{switch}", False):
        return plain, None, ()
    getattr(module, f"{switch}_enable")()
    recomputed = trace_pass(module, batch, policy)
    getattr(module, f"{switch}_disable")()
    return plain, recomputed, ()
