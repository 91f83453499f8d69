"""Blocks that watch a run: `comms_logger`, `flops_profiler`, `timers`, `autotuning`.

Lives here: keys and defaults. Does not live here: measuring (`comm.recorder`, `profiling`, `common.timing`, `autotuning`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from deepspeed.config.base import ConfigModel
from deepspeed.config.faults import Refusal
from deepspeed.config.values import (
    Freeform,
    NonNegativeNumber,
    NonNegativeWhole,
    PositiveNumber,
    PositiveWhole,
    TextList,
    Whole,
)

__all__ = [
    "AutotuningConfig",
    "CommsLoggerConfig",
    "FlopsProfilerConfig",
    "ModelInfoConfig",
    "ThroughputTimerConfig",
    "TimersConfig",
]


class CommsLoggerConfig(ConfigModel):
    """`comms_logger`: record collectives with their sizes, counts and bandwidths."""

    enabled: bool = False
    """Record them."""

    prof_all: bool = True
    """Record every collective; false records those in `prof_ops`."""

    prof_ops: TextList = Field(default_factory=list)
    """Names of the collectives to record, such as `all_reduce`."""

    verbose: bool = False
    """Log a line for each collective."""

    debug: bool = False
    """Add the calling function to the recorded name."""


class FlopsProfilerConfig(ConfigModel):
    """`flops_profiler`: operations and time per module at one step."""

    enabled: bool = False
    """Profile; also turns `wall_clock_breakdown` on."""

    recompute_fwd_factor: NonNegativeNumber = 0.0
    """Part of forward that backward computes again, 1.0 with full activation checkpointing: for the estimate of a step that
    the report gives beside what was counted."""

    profile_step: NonNegativeWhole = 1
    """Global step to profile: the one after so many updates. The first rank's value counts for all."""

    module_depth: Annotated[Whole, Field(ge=-1)] = -1
    """Depth of the printed tree and summary; -1 is all of it."""

    top_modules: PositiveWhole = 1
    """Modules listed per depth; > 0."""

    detailed: bool = True
    """Print the annotated tree of modules."""

    output_file: str | None = None
    """File for the report, written by the first rank. Left out: standard output."""

    peak_tflops: PositiveNumber | None = None
    """TFLOP/s that a device can do, for the share that the step reaches (MFU). Left out: what is known of it. Ours."""


class ThroughputTimerConfig(ConfigModel):
    """`timers.throughput`: samples per second."""

    enabled: bool = True
    """Measure it."""

    synchronized: bool = True
    """Wait for the device before reading the clock."""


class TimersConfig(ConfigModel):
    """`timers`: what is timed."""

    throughput: ThroughputTimerConfig = Field(default_factory=ThroughputTimerConfig)
    """Samples per second."""


class ModelInfoConfig(ConfigModel):
    """`autotuning.model_info`: facts that save a profiling run."""

    profile: bool = False
    """Measure these facts in a run of their own."""

    num_params: PositiveWhole | None = None
    """Parameters of the model."""

    hidden_size: PositiveWhole | None = None
    """Width of the model."""

    num_layers: PositiveWhole | None = None
    """Layers of the model."""


class AutotuningConfig(ConfigModel):
    """`autotuning`: search for the ZeRO stage, micro-batch and buckets that run fastest."""

    enabled: bool = False
    """Take part in the search that `deepspeed --autotuning` drives."""

    fast: bool = True
    """Search micro-batches only, for each stage."""

    results_dir: str = Field("autotuning_results", min_length=1)
    """Directory for results."""

    exps_dir: str = Field("autotuning_exps", min_length=1)
    """Directory for the experiments."""

    overwrite: bool = True
    """Clear earlier results."""

    start_profile_step: PositiveWhole = 3
    """First measured step."""

    end_profile_step: PositiveWhole = 5
    """Last measured step; the process ends after it."""

    metric: Literal["throughput", "latency", "flops", "forward", "backward", "step"] = "throughput"
    """What is compared."""

    metric_path: str | None = None
    """File that the engine writes the measurements to."""

    tuner_type: Literal["gridsearch", "random", "model_based"] = "gridsearch"
    """Order of the search."""

    tuner_early_stopping: PositiveWhole = 5
    """Experiments without gain after which the search stops."""

    tuner_num_trials: PositiveWhole = 50
    """Most experiments per search space."""

    arg_mappings: Freeform | None = None
    """Configuration key -> flag of the user's script that takes its value."""

    model_info: ModelInfoConfig | None = None
    """Facts about the model."""

    model_info_path: str | None = None
    """File that the profiling run writes those facts to."""

    mp_size: PositiveWhole = 1
    """Model-parallel ranks."""

    max_train_batch_size: PositiveWhole | None = None
    """Largest `train_batch_size` to try."""

    min_train_batch_size: PositiveWhole = 1
    """Smallest `train_batch_size` to try."""

    max_train_micro_batch_size_per_gpu: PositiveWhole = 1024
    """Largest micro-batch to try."""

    min_train_micro_batch_size_per_gpu: PositiveWhole = 1
    """Smallest micro-batch to try."""

    num_tuning_micro_batch_sizes: PositiveWhole = 3
    """Micro-batch sizes to try."""

    def check(self) -> Iterable[Refusal]:
        """Ranges have their ends in order."""
        if self.enabled and self.end_profile_step < self.start_profile_step:
            yield Refusal("end_profile_step", f"needed at least start_profile_step, {self.start_profile_step}", "Raise it.")
        if self.enabled and self.max_train_micro_batch_size_per_gpu < self.min_train_micro_batch_size_per_gpu:
            needed = f"needed at least the smallest, {self.min_train_micro_batch_size_per_gpu}"
            yield Refusal("max_train_micro_batch_size_per_gpu", needed, "Raise it.")
