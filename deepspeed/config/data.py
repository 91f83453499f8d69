"""Blocks about training data: `data_efficiency` and the old `curriculum_learning`.

Lives here: keys and ranges. Does not live here: schedules of difficulty, sampling, dropping of tokens (`data`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from deepspeed.config.base import ConfigModel
from deepspeed.config.faults import Refusal
from deepspeed.config.values import NonNegativeWhole, PositiveWhole

__all__ = ["CurriculumLearningConfig", "DataEfficiencyConfig"]


class CurriculumScheduleConfig(ConfigModel):
    """`schedule_config`: numbers of a curriculum schedule; which are needed depends on its type."""

    total_curriculum_step: PositiveWhole | None = None
    """Step at which the highest difficulty is reached (fixed_linear, fixed_root)."""

    difficulty_step: PositiveWhole | None = None
    """Difficulty is a multiple of this (fixed_linear, fixed_root)."""

    root_degree: PositiveWhole | None = None
    """Degree of the root (fixed_root)."""

    difficulty: list[PositiveWhole] | None = None
    """Difficulties in order (fixed_discrete)."""

    max_step: list[PositiveWhole] | None = None
    """Last step of each difficulty but the last (fixed_discrete)."""


ScheduleType = Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]
_NEEDED = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


def _check_schedule(kind: str | None, numbers: CurriculumScheduleConfig) -> Iterable[Refusal]:
    """A schedule has the numbers of its type."""
    for key in _NEEDED[kind or "custom"]:
        if getattr(numbers, key) is None:
            yield Refusal(f"schedule_config.{key}", f"needed with schedule_type {kind}", "Give it.")
    if kind == "fixed_discrete" and numbers.difficulty is not None and numbers.max_step is not None:
        steps = len(numbers.difficulty) - 1
        if len(numbers.max_step) != steps:
            yield Refusal("schedule_config.max_step", f"needed {steps} steps, one fewer than difficulties", "Correct one.")


class CurriculumMetricConfig(ConfigModel):
    """`data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.<name>`: one measure of difficulty."""

    index_to_sample_path: str | None = None
    """File of the data analyzer: difficulty -> samples."""

    index_to_metric_path: str | None = None
    """File of the data analyzer: index -> difficulty."""

    difficulty_type: Literal["value", "percentile"] = "value"
    """Whether difficulty is the measure itself or its percentile."""

    clustering_type: Literal["single_cluster", "schedule_based"] = "single_cluster"
    """Whether samples are sorted out as difficulty grows."""

    min_difficulty: NonNegativeWhole
    """Difficulty at the start."""

    max_difficulty: PositiveWhole
    """Difficulty at the end."""

    schedule_type: ScheduleType
    """How difficulty grows."""

    schedule_config: CurriculumScheduleConfig = Field(default_factory=CurriculumScheduleConfig)
    """Numbers of that schedule."""

    def check(self) -> Iterable[Refusal]:
        """The schedule has its numbers."""
        return _check_schedule(self.schedule_type, self.schedule_config)


class SamplingCurriculumConfig(ConfigModel):
    """`data_efficiency.data_sampling.curriculum_learning`: easy samples first."""

    enabled: bool = False
    """Sample by difficulty."""

    data_cluster_path: str | None = None
    """Directory for files about clusters."""

    curriculum_metrics: dict[str, CurriculumMetricConfig] = Field(default_factory=dict)
    """Measures of difficulty by name; needed when enabled."""

    def check(self) -> Iterable[Refusal]:
        """Difficulty needs a measure."""
        if self.enabled and not self.curriculum_metrics:
            yield Refusal("curriculum_metrics", "needed at least one measure when enabled", "Add one, such as seqlen.")


class DynamicBatchingConfig(ConfigModel):
    """`data_efficiency.data_sampling.dynamic_batching`: batches by tokens instead of samples."""

    enabled: bool = False
    """Make batches of at most `max_tokens`."""

    metrics_path: str | None = None
    """Files of the data analyzer with the lengths."""

    lr_scaling_method: Literal["linear", "sqrt", "none"] = "linear"
    """How the learning rate follows the size of a batch."""

    min_batch_size: PositiveWhole = 1
    """Fewest samples in a batch; > 0."""

    max_batch_size: PositiveWhole | None = None
    """Most samples in a batch."""

    sequence_picking_order: Literal["random", "seqlen", "dataloader"] = "dataloader"
    """Order in which samples fill batches."""

    max_tokens: PositiveWhole | None = None
    """Most tokens in a batch; needed when enabled."""

    verbose: bool = False
    """Log what each batch holds."""

    def check(self) -> Iterable[Refusal]:
        """The limit is the point of it."""
        if self.enabled and self.max_tokens is None:
            yield Refusal("max_tokens", "needed when dynamic_batching is enabled", "Give the most tokens of a batch.")


class DataSamplingConfig(ConfigModel):
    """`data_efficiency.data_sampling`: which samples, in which order."""

    enabled: bool = False
    """Use the sampler of this library."""

    num_epochs: PositiveWhole = 1000
    """Passes over the data set; > 0."""

    num_workers: NonNegativeWhole = 0
    """Worker processes of the loader."""

    pin_memory: bool = False
    """Use page-locked memory in the loader."""

    curriculum_learning: SamplingCurriculumConfig = Field(default_factory=SamplingCurriculumConfig)
    """Easy samples first."""

    dynamic_batching: DynamicBatchingConfig = Field(default_factory=DynamicBatchingConfig)
    """Batches by tokens."""


class LtdScheduleStepsConfig(ConfigModel):
    """`...random_ltd_schedule.schedule_config`: speed of growth."""

    require_steps: PositiveWhole
    """Steps until `max_value` is reached; > 0."""

    seq_per_step: PositiveWhole
    """Lengths are multiples of this; > 0."""


class LtdScheduleConfig(ConfigModel):
    """`data_efficiency.data_routing.random_ltd.random_ltd_schedule`: tokens kept, over time."""

    min_value: PositiveWhole
    """Tokens kept at the start."""

    max_value: PositiveWhole
    """Tokens kept at the end."""

    schedule_type: Literal["fixed_linear"] = "fixed_linear"
    """How the number grows."""

    schedule_config: LtdScheduleStepsConfig
    """Speed of growth."""


class LayerTokenLrConfig(ConfigModel):
    """`data_efficiency.data_routing.random_ltd.layer_token_lr_schedule`: not available in any version."""

    enabled: Literal[False] = False
    """Only false is accepted."""


class RandomLtdConfig(ConfigModel):
    """`data_efficiency.data_routing.random_ltd`: middle layers see a random part of the tokens (arXiv:2211.11586)."""

    enabled: bool = False
    """Drop tokens; the keys without a default are then required."""

    total_layer_num: PositiveWhole | None = None
    """Layers of the model."""

    random_ltd_layer_num: PositiveWhole | None = None
    """Layers that drop tokens; the length of `random_ltd_layer_id`."""

    random_ltd_layer_id: list[NonNegativeWhole] | None = None
    """Indices of those layers."""

    model_mask_name: str | None = None
    """Argument that carries the attention mask, or null."""

    model_type: Literal["encoder", "decoder"] | None = None
    """Kind of model."""

    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] | None = None
    """Order of the dimensions of hidden states."""

    random_ltd_schedule: LtdScheduleConfig | None = None
    """Tokens kept, over time."""

    layer_token_lr_schedule: LayerTokenLrConfig = Field(default_factory=LayerTokenLrConfig)
    """Not available; kept for old files."""

    global_batch_size: PositiveWhole | None = None
    """The engine fills this in."""

    micro_batch_size: PositiveWhole | None = None
    """The engine fills this in."""

    def check(self) -> Iterable[Refusal]:
        """Enabled, the keys about the model are needed."""
        if not self.enabled:
            return
        required = ("total_layer_num", "random_ltd_layer_num", "random_ltd_layer_id", "model_type", "hidden_state_order")
        for key in (*required, "random_ltd_schedule"):
            if getattr(self, key) is None:
                yield Refusal(key, "needed when random_ltd is enabled", "Give it.")
        layers = self.random_ltd_layer_id
        if layers is not None and self.random_ltd_layer_num not in (None, len(layers)):
            yield Refusal("random_ltd_layer_num", f"needed the length of random_ltd_layer_id, {len(layers)}", "Correct one.")


class DataRoutingConfig(ConfigModel):
    """`data_efficiency.data_routing`: which tokens go through which layers."""

    enabled: bool = False
    """Allow it."""

    random_ltd: RandomLtdConfig = Field(default_factory=RandomLtdConfig)
    """Random dropping of tokens in middle layers."""


class DataEfficiencyConfig(ConfigModel):
    """`data_efficiency`: learn as much from less data."""

    enabled: bool = False
    """Allow the blocks inside."""

    seed: NonNegativeWhole = 1234
    """Seed of the sampler."""

    data_sampling: DataSamplingConfig = Field(default_factory=DataSamplingConfig)
    """Which samples, in which order."""

    data_routing: DataRoutingConfig = Field(default_factory=DataRoutingConfig)
    """Which tokens go through which layers."""


class CurriculumLearningConfig(ConfigModel):
    """`curriculum_learning`: the old form; write `data_efficiency.data_sampling.curriculum_learning`."""

    enabled: bool = False
    """Grow the sequence length over time."""

    curriculum_type: str = "seqlen"
    """Measure of difficulty; `seqlen` hands forward the argument `curriculum_seqlen`."""

    min_difficulty: NonNegativeWhole | None = None
    """Difficulty at the start; needed when enabled."""

    max_difficulty: PositiveWhole | None = None
    """Difficulty at the end; needed when enabled."""

    schedule_type: ScheduleType | None = None
    """How difficulty grows; needed when enabled."""

    schedule_config: CurriculumScheduleConfig = Field(default_factory=CurriculumScheduleConfig)
    """Numbers of that schedule."""

    def check(self) -> Iterable[Refusal]:
        """Enabled, it needs its limits and a schedule."""
        if not self.enabled:
            return
        for key in ("min_difficulty", "max_difficulty", "schedule_type"):
            if getattr(self, key) is None:
                yield Refusal(key, "needed when curriculum_learning is enabled", "Give it.")
        yield from _check_schedule(self.schedule_type, self.schedule_config)
