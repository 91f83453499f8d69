"""Planners of a pipeline's stages: each stage is built in turn, as its first rank, and its batch is traced.

    function ---each stage---> PipelineModule ---output_form---> what the next stage gets
                                    '-----------trace_stage---> Timeline ---> Planner

Parts of layers (AutoTP) are cut before, as `initialize` does it. Called by `of_module`. Does not live here: a batch of one
stage (`stages`), building (`building`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.experts import place_experts
from deepspeed.engine.pipeline_data import pair_of
from deepspeed.errors import ArgumentError
from deepspeed.pipe.forms import Form
from deepspeed.pipe.module import PipelineModule
from deepspeed.planning.building import Build, each_stage
from deepspeed.planning.cutting import current_mesh_kept
from deepspeed.planning.planner import Planner
from deepspeed.planning.ranks import Ranks
from deepspeed.planning.sources import Subject
from deepspeed.planning.stages import Pipeline, batch_nbytes, output_form, place_of, sent_by_stage, trace_stage
from deepspeed.planning.states import Optimizers
from deepspeed.planning.timeline import Timeline
from deepspeed.planning.tracing import Batch
from deepspeed.precision.policy import DtypePolicy, exact_batch_norm
from deepspeed.tensor_parallel.auto import cut_without_values

__all__ = ["StagesPlanned", "stages_planned"]


class StagesPlanned(NamedTuple):
    """What is known of a pipeline."""

    planners: list[Planner]
    """For the first rank of each stage."""

    numel: int
    """Parameters of the whole model, those of tied modules once."""

    notes: tuple[str, ...]


@dataclass
class _Stages:
    """Stages as they are built, and what they hand on."""

    config: DeepSpeedConfig
    pipeline: Pipeline | None
    """None: activations are not counted."""

    forms: list[Form | None]
    numel: int = 0

    def pass_on(self, module: PipelineModule, chunk: int) -> None:
        """Find what the next part gets."""
        virtual = chunk * module.num_stages + module.stage_id
        if self.pipeline is not None and virtual + 1 < len(self.forms):
            given = self.forms[virtual] if virtual else self.pipeline.inputs
            self.forms[virtual + 1] = output_form(module, chunk, given, self.pipeline.policy)

    def trace(self, module: PipelineModule) -> Timeline | None:
        """One batch of a stage that knows what it gets and gives."""
        if self.pipeline is None:
            return None
        interval = module.activation_checkpoint_interval
        module.set_checkpoint_interval(self.config.pipeline.activation_checkpoint_interval or interval)  # as the engine
        try:
            return trace_stage(module, replace(self.pipeline, forms=self.forms))
        finally:
            module.set_checkpoint_interval(interval)


def stages_planned(
    build: Build, first: PipelineModule, batch: Batch | None, config: DeepSpeedConfig, ranks: Ranks, device_type: str
) -> StagesPlanned:
    """Build and trace each stage.

    Args:
        build: makes the pipeline.
        first: what it made for the first rank.
        batch: `((inputs, labels), {})` of one micro-batch; None: activations are left out.
        config: of the engine.
        ranks: of one stage.
        device_type: of the devices.

    Raises:
        ArgumentError: the batch is none of a pipeline, a layer cannot do without values, or layers cannot be cut so.
    """
    stages = _Stages(config, _pipeline(batch, config), [None] * (first.num_stages * first.num_chunks))
    built = list(_traced(build, first, stages, ranks.world * first.num_stages))
    if first.num_chunks > 1:
        built = list(_traced_in_a_circle([module for module, _ in built], stages))
    planners = [_planner(module, timeline, stages, ranks, device_type) for module, timeline in built]
    return StagesPlanned(planners, stages.numel, () if batch is not None else (_NO_BATCH,))


def _planner(module: PipelineModule, timeline: Timeline | None, stages: _Stages, ranks: Ranks, device_type: str) -> Planner:
    subject = Subject(type(module).__name__, sum(param.numel() for param in module.parameters()), module)
    if stages.pipeline is None:
        return Planner(subject, ranks, timeline, Optimizers(module), device_type)
    pipeline, place = replace(stages.pipeline, forms=stages.forms), place_of(module)
    held, passed = batch_nbytes(pipeline, place), sent_by_stage(pipeline, place)
    return Planner(subject, ranks, timeline, Optimizers(module), device_type, held, passed)


_NO_BATCH = "activations are not counted: give a batch ((inputs, labels), {}), or return (model, (inputs, labels), {})"


def _pipeline(batch: Batch | None, config: DeepSpeedConfig) -> Pipeline | None:
    if batch is None:
        return None
    args, kwargs = batch
    if kwargs or len(args) > 2:
        raise ArgumentError(
            f"a batch of {len(args)} arguments and the names {sorted(kwargs)} was given for a pipeline; needed is what its "
            "data iterator gives for one micro-batch: ((inputs, labels), {}). Put several inputs into one tuple."
        )
    inputs, labels = pair_of(args)
    policy = DtypePolicy.from_config(config, "cpu")
    return Pipeline(config.pipeline.schedule, config.gradient_accumulation_steps, policy, inputs, labels, ())


def _traced(
    build: Build, first: PipelineModule, stages: _Stages, world_size: int
) -> Iterator[tuple[PipelineModule, Timeline | None]]:
    """Each stage; with several chunks not traced yet, for the first gets something of the last."""
    for module, _ in each_stage(build, first, world_size):
        assert isinstance(module, PipelineModule)  # as for the first rank
        copies = {id(p) for tie in module.tie_groups if not tie.is_owner for p in _params_of(tie.key, module)}
        stages.numel += sum(param.numel() for param in module.parameters() if id(param) not in copies)
        with current_mesh_kept(), exact_batch_norm(module):
            _cut_layers(module, stages.config)
            place_experts(module, module.mesh)
            stages.pass_on(module, 0)
            yield module, stages.trace(module) if module.num_chunks == 1 else None


def _traced_in_a_circle(
    modules: Sequence[PipelineModule], stages: _Stages
) -> Iterator[tuple[PipelineModule, Timeline | None]]:
    for chunk in range(1, modules[0].num_chunks):
        for module in modules:
            stages.pass_on(module, chunk)
    for module in modules:
        with exact_batch_norm(module):
            yield module, stages.trace(module)


def _params_of(key: str, module: PipelineModule) -> Iterator[nn.Parameter]:
    if key in module.tied_modules:
        yield from module.tied_modules[key].parameters()


def _cut_layers(module: PipelineModule, config: DeepSpeedConfig) -> None:
    """As `initialize` does it."""
    block, axis = config.tensor_parallel, module.mesh.axis("tensor")
    if max(block.autotp_size, block.tensor_parallel.tp_size) > 1 and axis.size > 1:
        cut_without_values(module, block, axis)
