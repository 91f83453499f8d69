"""Every ZeRO stage and offload side by side: `deepspeed.plan`.

    subject, configuration --> layers cut over tensor ranks (`cutting`) --> one timeline (`tracing`)
                           --> for each setting: states at its busiest moment + traffic --> RankPlan
                               the one asked for, the lowest stage that fits, advice

Called by `deepspeed.plan` and by `command`. Does not live here: the terms (`states`, `tracing`), drawing (`text`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from deepspeed.config import DeepSpeedConfig, load_config
from deepspeed.engine.degrees import Degrees
from deepspeed.errors import ArgumentError, ConfigError
from deepspeed.planning.cutting import cut_over_tensor_ranks
from deepspeed.planning.formula import states_by_formula
from deepspeed.planning.sources import Subject, subject_of
from deepspeed.planning.states import ModelStates, Optimizers, Ranks, model_states
from deepspeed.planning.terms import RankPlan, Term
from deepspeed.planning.timeline import Timeline
from deepspeed.planning.tracing import Batch, trace_pass
from deepspeed.planning.traffic import sent_nbytes
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
        model_or_config: a module (values are not read), a Hugging Face configuration (object, name, folder, file),
            "module:function" that builds one, or a number of parameters.
        ds_config: as `deepspeed.initialize` takes it; batch sizes that are left out or "auto" count as
            1 micro-batch of 1 row.
        world_size: ranks.
        device_memory: bytes of one device; None: nothing is said about fitting.
        sequence_length: tokens of a row, for Hugging Face language models.
        batch: arguments of forward `(args, kwargs)` for one micro-batch of one rank; without it activations of other models
            are left out.
        device_type: of the devices. On "cpu" host memory is the device's, so that a tier "cpu" moves nothing.

    Raises:
        ConfigError: the configuration does not start.
        ArgumentError: the model cannot be read, or cannot be spread over the ranks as the configuration asks.
    """
    raw = _with_batch(load_config(ds_config))
    config, ranks = _config(raw, world_size)
    sequence = config.sequence_parallel_size
    subject = subject_of(
        model_or_config, config.train_micro_batch_size_per_gpu, sequence_length, batch, sequence_ranks=sequence
    )
    with cut_over_tensor_ranks(subject, config, ranks.tensor) as on_rank:
        found = _compared(on_rank, raw, config, ranks, device_type)
    return replace(found, numel=subject.numel, device_nbytes=device_memory)


def _compared(
    subject: Subject, raw: Mapping[str, Any], config: DeepSpeedConfig, ranks: Ranks, device_type: str
) -> Comparison:
    module = subject.module
    with exact_batch_norm(module) if module is not None else nullcontext():
        timeline, recomputed, notes = _timelines(subject, config)
        optimizers = Optimizers(module) if module is not None else None
        planner = _Planner(subject, ranks, timeline, optimizers, device_type)
        asked = planner.plan("as configured", config)
        others = []
        for label, each in _alternatives(raw):
            try:
                others.append(planner.plan(label, _config(each, ranks.world)[0]))
            except ConfigError as error:  # a key of this configuration has no meaning there
                notes += (f"{label} is left out: {str(error).splitlines()[-1].strip()}",)
    if config.optimizer is None:
        notes += ('the configuration names no optimizer: AdamW is counted. Name yours under "optimizer".',)
    less = recomputed.peak_nbytes if recomputed is not None else None
    return Comparison(subject.name, subject.numel, ranks.world, None, asked, tuple(others), notes, less)


def _with_batch(raw: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in raw.items() if not (key in _BATCH and value == "auto")}
    return given if any(key in given for key in _BATCH) else {**given, "train_micro_batch_size_per_gpu": 1}


def _config(raw: Mapping[str, Any], world_size: int) -> tuple[DeepSpeedConfig, Ranks]:
    values = copy.deepcopy(dict(raw))
    sequence, tensor = Degrees.of(values, None)
    block = values.get("expert_parallel") or {}
    if block.get("enabled") and block.get("autoep_size", 1) > 1:
        raise ArgumentError(
            f"expert_parallel.autoep_size = {block['autoep_size']}: the plan does not spread stacked experts over ranks. "
            "Leave the block out: the plan then counts every expert on every rank."
        )
    if world_size % (sequence * tensor):
        raise ArgumentError(
            f"{world_size} ranks are no multiple of sequence_parallel_size = {sequence} x autotp_size = {tensor}. Change "
            "one of them."
        )
    config = DeepSpeedConfig(values, dp_world_size=world_size // (sequence * tensor), world_size=world_size)
    return config, Ranks(world_size, tensor)


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


def _alternatives(raw: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Stages and offloads, the fastest first."""
    block = raw.get("zero_optimization") or {}
    base = {key: value for key, value in block.items() if key not in ("stage", "offload_optimizer", "offload_param")}
    on_host = {"device": "cpu"}
    for stage in range(4):
        yield f"stage {stage}", {**raw, "zero_optimization": {**base, "stage": stage}}
    for stage in (1, 2, 3):
        offloaded = {**base, "stage": stage, "offload_optimizer": on_host}
        yield f"stage {stage}, optimizer on host", {**raw, "zero_optimization": offloaded}
    everything = {**base, "stage": 3, "offload_optimizer": on_host, "offload_param": on_host}
    yield "stage 3, optimizer and parameters on host", {**raw, "zero_optimization": everything}


@dataclass(frozen=True)
class _Planner:
    subject: Subject
    ranks: Ranks
    timeline: Timeline | None
    optimizers: Optimizers | None
    device_type: str

    def plan(self, label: str, config: DeepSpeedConfig) -> RankPlan:
        """One setting's."""
        states = self._states(config)
        sent = sent_nbytes(
            config.zero_optimization.stage,
            states.weight_nbytes,
            states.gradient_nbytes,
            self.ranks.zero,
            config.gradient_accumulation_steps,
            stays_gathered=states.stays_gathered,
        )
        return RankPlan(label, (*states.terms, *self._inputs()), sent)

    def _states(self, config: DeepSpeedConfig) -> ModelStates:
        module, kind = self.subject.module, self.device_type
        if module is None or self.optimizers is None:
            return states_by_formula(self.subject.numel, config, self.ranks.zero, device_type=kind)
        return model_states(module, config, self.ranks, self.optimizers, self.timeline, device_type=kind)

    def _inputs(self) -> Iterator[Term]:
        if self.timeline is not None:
            tensors = [each for each in tree_leaves(self.subject.batch) if isinstance(each, Tensor)]
            yield Term("inputs", sum(each.numel() * each.element_size() for each in tensors), moment="pass")
