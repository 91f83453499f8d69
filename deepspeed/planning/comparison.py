"""Every ZeRO stage and offload side by side. Pure: no torch.

    planners, configuration --> for each setting: the plan of the rank that is fullest --> the one that was asked for,
                                the lowest stage that fits, advice

Called by `planned` and `of_module`. Does not live here: planners (`formula`, `planner`), drawing (`text`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deepspeed.config import DeepSpeedConfig
from deepspeed.config.degrees import sequence_ranks, tensor_ranks
from deepspeed.errors import ArgumentError, ConfigError
from deepspeed.planning.ranks import Ranks
from deepspeed.planning.terms import RankPlan

__all__ = ["NOT_TRACED", "Asked", "Comparison", "Plans", "compared", "with_batch"]

NOT_TRACED = "activations are not counted: give a model and a batch"
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class Plans(Protocol):
    """Plans for one rank."""

    def plan(self, label: str, config: DeepSpeedConfig) -> RankPlan:
        """One setting's.

        Raises:
            ConfigError: what is planned cannot be trained so.
        """


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


@dataclass(frozen=True)
class Asked:
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
        sequence, tensor = sequence_ranks(values), self.tensor or tensor_ranks(values)
        if self.world_size % (sequence * tensor * self.pipe):
            of_stages = f"{self.pipe} stages x " if self.pipe > 1 else ""
            raise ArgumentError(
                f"{self.world_size} ranks are no multiple of {of_stages}sequence_parallel_size = {sequence} x autotp_size = "
                f"{tensor}. Change one of them."
            )
        data = self.world_size // (sequence * tensor * self.pipe)
        config = DeepSpeedConfig(values, dp_world_size=data, world_size=self.world_size)
        return config, Ranks(self.world_size // self.pipe, tensor)


def compared(planners: Sequence[Plans], asked: Asked, config: DeepSpeedConfig, notes: tuple[str, ...] = ()) -> Comparison:
    """All settings, each on the rank that is fullest then; the caller says for what.

    Args:
        planners: for the first rank of each stage of a pipeline, or for one rank.
        asked: what was asked for.
        config: of the same.
        notes: what is not counted, and why.
    """
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


def _fullest(planners: Sequence[Plans], label: str, config: DeepSpeedConfig) -> RankPlan:
    return max((each.plan(label, config) for each in planners), key=RankPlan.peak_nbytes)


def with_batch(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with batch sizes: those that are left out or "auto" count as 1 micro-batch of 1 row."""
    given = {key: value for key, value in raw.items() if not (key in _BATCH and value == "auto")}
    return given if any(key in given for key in _BATCH) else {**given, "train_micro_batch_size_per_gpu": 1}


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
