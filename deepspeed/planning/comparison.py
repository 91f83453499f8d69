"""Every ZeRO stage and offload side by side: `deepspeed.plan`.

    subject, configuration --> layers cut over tensor ranks (`cutting`) --> one timeline (`tracing`)
    pipeline               --> each stage (`pipelines`)                 --> one timeline each (`stages`)
                           --> for each setting: states at its busiest moment + traffic --> RankPlan (`planner`)
                               the one asked for, the lowest stage that fits, advice

Called by `deepspeed.plan` and by `command`. Does not live here: the terms (`states`, `tracing`), drawing (`text`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from deepspeed.config import DeepSpeedConfig, load_config
from deepspeed.engine.degrees import Degrees
from deepspeed.errors import ArgumentError, ConfigError
from deepspeed.pipe.module import PipelineModule
from deepspeed.planning.building import Build, build_on, function_of
from deepspeed.planning.cutting import cut_over_tensor_ranks
from deepspeed.planning.pipelines import stages_planned
from deepspeed.planning.planner import Planner
from deepspeed.planning.sources import Subject, subject_of
from deepspeed.planning.states import Optimizers, Ranks
from deepspeed.planning.terms import RankPlan
from deepspeed.planning.timeline import Timeline
from deepspeed.planning.tracing import Batch, trace_pass
from deepspeed.precision.policy import DtypePolicy, exact_batch_norm

__all__ = ["Comparison", "plan"]

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_SWITCHES = ("activation_checkpointing", "gradient_checkpointing")  # of Hugging Face models, the newer name first


@dataclass(frozen=True)
class Comparison:
    """The plan of the setting that was asked for, and those of the others."""

    subject: str
    numel: int
    ranks: int
    device_nbytes: float | None
    asked: RankPlan
    others: tuple[RankPlan, ...]
    """Stages 0 to 3 without and with offload, in this order."""
    notes: tuple[str, ...]
    """What is not counted, and why."""
    recomputed_nbytes: int | None = None
    """Activations at their peak with every block recomputed in backward; None: unknown."""

    stages: tuple[RankPlan, ...] = ()
    """Of a pipeline, the setting that was asked for on the first rank of each stage; `asked` is the fullest of them."""

    def lowest_that_fits(self) -> RankPlan | None:
        """The first of `others` that fits the device; None: none does, or the device's size is unknown."""
        if self.device_nbytes is None:
            return None
        size = self.device_nbytes
        return next((each for each in self.others if each.fits(size)), None)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        fitting = self.lowest_that_fits()
        return {
            "model": self.subject,
            "parameters": self.numel,
            "ranks": self.ranks,
            "device_nbytes": self.device_nbytes,
            "asked": self.asked.as_dict(),
            "others": [each.as_dict() for each in self.others],
            "lowest_that_fits": fitting.label if fitting is not None else None,
            "notes": list(self.notes),
            "recomputed_activation_nbytes": self.recomputed_nbytes,
            "stages": [each.as_dict() for each in self.stages],
        }


def plan(
    model_or_config: Any,
    ds_config: Any,
    world_size: int,
    device_memory: float | None = None,
    *,
    sequence_length: int | None = None,
    batch: Batch | None = None,
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
    raw = _with_batch(load_config(ds_config))
    build = function_of(model_or_config)
    if build is None:
        found = _of_model(model_or_config, batch, _Asked(raw, world_size, device_type), sequence_length)
        return replace(found, device_nbytes=device_memory)
    with build_on(build, world_size) as built:
        module, given = built.module, batch or built.batch
    asked = _Asked(raw, world_size, device_type)
    if isinstance(module, PipelineModule):
        found = _of_pipeline(
            build, module, given, replace(asked, pipe=module.num_stages, tensor=module.mesh.sizes["tensor"])
        )
    else:
        found = _of_model(module, given, asked, sequence_length)
    return replace(found, device_nbytes=device_memory)


@dataclass(frozen=True)
class _Asked:
    """A configuration, and the ranks that it is for."""

    raw: Mapping[str, Any]
    world_size: int
    device_type: str
    pipe: int = 1
    tensor: int | None = None
    """None: what the configuration says."""

    def config(self, raw: Mapping[str, Any] | None = None) -> tuple[DeepSpeedConfig, Ranks]:
        """It, or a neighbour of it; and the ranks that hold what the first one does, or other parts of it."""
        values = copy.deepcopy(dict(self.raw if raw is None else raw))
        sequence, tensor = Degrees.of(values, None)
        tensor = self.tensor or tensor
        _refuse_stacked(values)
        if self.world_size % (sequence * tensor * self.pipe):
            of_stages = f"{self.pipe} stages x " if self.pipe > 1 else ""
            raise ArgumentError(
                f"{self.world_size} ranks are no multiple of {of_stages}sequence_parallel_size = {sequence} x autotp_size = "
                f"{tensor}. Change one of them."
            )
        data = self.world_size // (sequence * tensor * self.pipe)
        config = DeepSpeedConfig(values, dp_world_size=data, world_size=self.world_size)
        return config, Ranks(self.world_size // self.pipe, tensor)


def _refuse_stacked(values: Mapping[str, Any]) -> None:
    block = values.get("expert_parallel") or {}
    if block.get("enabled") and block.get("autoep_size", 1) > 1:
        raise ArgumentError(
            f"expert_parallel.autoep_size = {block['autoep_size']}: the plan does not spread stacked experts over ranks. "
            "Leave the block out: the plan then counts every expert on every rank."
        )


def _of_model(source: Any, batch: Batch | None, asked: _Asked, sequence_length: int | None) -> Comparison:
    config, ranks = asked.config()
    sequence = config.sequence_parallel_size
    subject = subject_of(source, config.train_micro_batch_size_per_gpu, sequence_length, batch, sequence_ranks=sequence)
    with cut_over_tensor_ranks(subject, config, ranks.tensor) as on_rank:
        module = on_rank.module
        with exact_batch_norm(module) if module is not None else nullcontext():
            timeline, recomputed, notes = _timelines(on_rank, config)
            optimizers = Optimizers(module) if module is not None else None
            inputs = 0 if timeline is None else _nbytes_of(on_rank.batch)
            planner = Planner(on_rank, ranks, timeline, optimizers, asked.device_type, inputs)
            found = _compared([planner], asked, config, notes)
    less = recomputed.peak_nbytes if recomputed is not None else None
    return replace(found, subject=subject.name, numel=subject.numel, recomputed_nbytes=less)


def _of_pipeline(build: Build, first: PipelineModule, batch: Batch | None, asked: _Asked) -> Comparison:
    config, ranks = asked.config()
    stages = stages_planned(build, first, batch, config, ranks, asked.device_type)
    found = _compared(stages.planners, asked, config, stages.notes)
    each = tuple(
        planner.plan(f"stage {number} of {first.num_stages}", config) for number, planner in enumerate(stages.planners)
    )
    return replace(found, subject=type(first).__name__, numel=stages.numel, stages=each)


def _compared(planners: Sequence[Planner], asked: _Asked, config: DeepSpeedConfig, notes: tuple[str, ...]) -> Comparison:
    """All settings, each on the rank that is fullest then."""
    plan_of_asked = _fullest(planners, "as configured", config)
    others = []
    if asked.pipe > 1:
        notes += ("stages 2 and 3 are left out: a pipeline adds gradients up over its micro-batches, at ZeRO stage 0 or 1.",)
    for label, each in _alternatives(asked.raw, most_stage=1 if asked.pipe > 1 else 3):
        try:
            others.append(_fullest(planners, label, asked.config(each)[0]))
        except ConfigError as error:  # a key of this configuration has no meaning there
            notes += (f"{label} is left out: {str(error).splitlines()[-1].strip()}",)
    if config.optimizer is None:
        notes += ('the configuration names no optimizer: AdamW is counted. Name yours under "optimizer".',)
    return Comparison("", 0, asked.world_size, None, plan_of_asked, tuple(others), notes)


def _fullest(planners: Sequence[Planner], label: str, config: DeepSpeedConfig) -> RankPlan:
    return max((each.plan(label, config) for each in planners), key=RankPlan.peak_nbytes)


def _nbytes_of(batch: Batch | None) -> int:
    return sum(each.numel() * each.element_size() for each in tree_leaves(batch) if isinstance(each, Tensor))


def _with_batch(raw: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in raw.items() if not (key in _BATCH and value == "auto")}
    return given if any(key in given for key in _BATCH) else {**given, "train_micro_batch_size_per_gpu": 1}


def _timelines(subject: Subject, config: DeepSpeedConfig) -> tuple[Timeline | None, Timeline | None, tuple[str, ...]]:
    """Without and with recomputation, and what has to be said about them."""
    module, batch = subject.module, subject.batch
    if module is None or batch is None:
        return None, None, ("activations are not counted: give a model and a batch",)
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


def _alternatives(raw: Mapping[str, Any], most_stage: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Stages up to one, and offloads, the fastest first."""
    block = raw.get("zero_optimization") or {}
    base = {key: value for key, value in block.items() if key not in ("stage", "offload_optimizer", "offload_param")}
    on_host = {"device": "cpu"}
    for stage in range(most_stage + 1):
        yield f"stage {stage}", {**raw, "zero_optimization": {**base, "stage": stage}}
    for stage in range(1, most_stage + 1):
        offloaded = {**base, "stage": stage, "offload_optimizer": on_host}
        yield f"stage {stage}, optimizer on host", {**raw, "zero_optimization": offloaded}
    everything = {**base, "stage": 3, "offload_optimizer": on_host, "offload_param": on_host}
    if most_stage == 3:
        yield "stage 3, optimizer and parameters on host", {**raw, "zero_optimization": everything}
