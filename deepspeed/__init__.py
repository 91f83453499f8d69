"""Take a PyTorch model and training loop from one device to thousands without a rewrite.

    engine, optimizer, loader, schedule = deepspeed.initialize(model=model, config="ds_config.json")

Lives here: the public names, loaded when first used. `import deepspeed` alone loads neither torch nor any room, and every
documented dotted path works after it (`deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.common.lazy import attach
from deepspeed.version import version, version_major, version_minor, version_patch

if TYPE_CHECKING:  # what type checkers and editors see; a test holds it equal to _NAMES
    from deepspeed.accelerator import get_accelerator as get_accelerator
    from deepspeed.activations import checkpointing as checkpointing
    from deepspeed.api import DeepSpeedOptimizerCallable as DeepSpeedOptimizerCallable
    from deepspeed.api import DeepSpeedSchedulerCallable as DeepSpeedSchedulerCallable
    from deepspeed.api import initialize as initialize
    from deepspeed.api import load_ds_config as load_ds_config
    from deepspeed.comm import init_distributed as init_distributed
    from deepspeed.common.logging import log_dist as log_dist
    from deepspeed.common.logging import logger as logger
    from deepspeed.common.on_device import OnDevice as OnDevice
    from deepspeed.config import DeepSpeedConfig as DeepSpeedConfig
    from deepspeed.config.arguments import add_config_arguments as add_config_arguments
    from deepspeed.data import DeepSpeedDataLoader as DeepSpeedDataLoader
    from deepspeed.engine.engine import DeepSpeedEngine as DeepSpeedEngine
    from deepspeed.engine.pipeline import PipelineEngine as PipelineEngine
    from deepspeed.errors import ConfigError
    from deepspeed.pipe.module import PipelineModule as PipelineModule
    from deepspeed.planning import plan as plan
    from deepspeed.tensor_parallel.recorded import set_autotp_mode as set_autotp_mode
    from deepspeed.tensor_parallel.recorded import tp_model_init as tp_model_init
    from deepspeed.version import git_branch as git_branch
    from deepspeed.version import git_hash as git_hash
    from deepspeed.zero.optimizer import DeepSpeedOptimizer as DeepSpeedOptimizer

    DeepSpeedConfigError = ConfigError

__version__ = version
__version_major__ = version_major
__version_minor__ = version_minor
__version_patch__ = version_patch

_NAMES = {
    "DeepSpeedConfig": "deepspeed.config:DeepSpeedConfig",
    "DeepSpeedConfigError": "deepspeed.errors:ConfigError",
    "DeepSpeedDataLoader": "deepspeed.data:DeepSpeedDataLoader",
    "DeepSpeedEngine": "deepspeed.engine.engine:DeepSpeedEngine",
    "PipelineEngine": "deepspeed.engine.pipeline:PipelineEngine",
    "DeepSpeedOptimizer": "deepspeed.zero.optimizer:DeepSpeedOptimizer",
    "DeepSpeedOptimizerCallable": "deepspeed.api:DeepSpeedOptimizerCallable",
    "DeepSpeedSchedulerCallable": "deepspeed.api:DeepSpeedSchedulerCallable",
    "OnDevice": "deepspeed.common.on_device:OnDevice",
    "PipelineModule": "deepspeed.pipe.module:PipelineModule",
    "__git_branch__": "deepspeed.version:git_branch",
    "__git_hash__": "deepspeed.version:git_hash",
    "add_config_arguments": "deepspeed.config.arguments:add_config_arguments",
    "checkpointing": "deepspeed.activations.checkpointing",
    "dist": "deepspeed.comm",
    "get_accelerator": "deepspeed.accelerator:get_accelerator",
    "git_branch": "deepspeed.version:git_branch",
    "git_hash": "deepspeed.version:git_hash",
    "init_distributed": "deepspeed.comm:init_distributed",
    "initialize": "deepspeed.api:initialize",
    "load_ds_config": "deepspeed.api:load_ds_config",
    "log_dist": "deepspeed.common.logging:log_dist",
    "logger": "deepspeed.common.logging:logger",
    "plan": "deepspeed.planning:plan",
    "set_autotp_mode": "deepspeed.tensor_parallel.recorded:set_autotp_mode",
    "tp_model_init": "deepspeed.tensor_parallel.recorded:tp_model_init",
}

_SUBMODULES = (
    "accelerator",
    "checkpoint",
    "comm",
    "config",
    "elasticity",
    "env_report",
    "errors",
    "git_version_info",
    "io",
    "launcher",
    "module_inject",
    "moe",
    "monitor",
    "nvme",
    "ops",
    "pipe",
    "profiling",
    "runtime",
    "sequence",
    "utils",
    "zero",
)

_UNBUILT_NAMES = (
    "DeepSpeedHybridEngine",
    "DeepSpeedInferenceConfig",
    "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer",
    "InferenceEngine",
    "autotuning",
    "compression",
    "default_inference_config",
    "inference",
    "init_inference",
    "linear",
    "merge_tp_model_init_into_config",
    "record_tp_model_init_args",
    "replace_transformer_layer",
    "resolve_per_head_muon_after_sharding",
    "revert_transformer_layer",
    "sequence",
    "set_optimizer_flags",
)
"""Documented names that this version does not have. Each disappears from here when its feature arrives."""

__all__ = [
    *_NAMES,
    *_SUBMODULES,
    "__version__",
    "__version_major__",
    "__version_minor__",
    "__version_patch__",
    "version",
]

__getattr__, __dir__ = attach(
    __name__,
    submodules=_SUBMODULES,
    names=_NAMES,
    unbuilt={name: f"deepspeed.{name} is not built yet in {version}; see the table in README.md" for name in _UNBUILT_NAMES},
)
