"""The documented question methods of the engine: `engine.gradient_clipping()`, `engine.zero_optimization_stage()`, ...

One table maps each name to a path in the config (`zero_<key>` for every key of `zero_optimization`); the methods are made
from it. Batch sizes are not here: they can change while training, so the engine answers for them itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepspeed.config.zero import ZeroConfig

if TYPE_CHECKING:
    from deepspeed.config import DeepSpeedConfig

_PATHS: dict[str, str] = {
    "gradient_clipping": "gradient_clipping",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "steps_per_print": "steps_per_print",
    "dump_state": "dump_state",
    "log_level": "log_level",
    "memory_breakdown": "memory_breakdown",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "dataloader_drop_last": "dataloader_drop_last",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "sparse_gradients_enabled": "sparse_gradients",
    "graph_harvesting": "graph_harvesting",
    "fp16_enabled": "fp16.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "loss_scale": "fp16.loss_scale",
    "bfloat16_enabled": "bf16.enabled",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_dtype": "torch_autocast.dtype",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "zero_optimization_stage": "zero_optimization.stage",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    **{f"zero_{key.removeprefix('zero_')}": f"zero_optimization.{key}" for key in ZeroConfig.model_fields},
    "aio_config": "aio",
    "tensor_parallel_config": "tensor_parallel",
    "checkpoint_serialization_enabled": "checkpoint.checkpoint_serialization",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "flops_profiler_profile_step": "flops_profiler.profile_step",
    "flops_profiler_module_depth": "flops_profiler.module_depth",
    "flops_profiler_top_modules": "flops_profiler.top_modules",
    "flops_profiler_detailed": "flops_profiler.detailed",
    "flops_profiler_output_file": "flops_profiler.output_file",
    "flops_profiler_recompute_fwd_factor": "flops_profiler.recompute_fwd_factor",
    "autotuning_enabled": "autotuning.enabled",
    "data_efficiency_enabled": "data_efficiency.enabled",
    "data_efficiency_config": "data_efficiency",
    "is_sanity_checks_enabled": "zero_optimization.enable_sanity_checks",
    "elasticity_enabled": "elasticity.enabled",
    "amp_enabled": "amp.enabled",
    "pld_enabled": "progressive_layer_drop.enabled",
    "eigenvalue_enabled": "eigenvalue.enabled",
}

_DERIVED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "optimizer_name": ("optimizer", lambda block: None if block is None else block.type.lower()),
    "optimizer_params": ("optimizer", lambda block: None if block is None else dict(block.params)),
    "optimizer_legacy_fusion": ("optimizer", lambda block: False if block is None else block.legacy_fusion),
    "scheduler_name": ("scheduler", lambda block: None if block is None else block.type),
    "scheduler_params": ("scheduler", lambda block: None if block is None else dict(block.params)),
    "postscale_gradients": ("prescale_gradients", operator.not_),
    "dynamic_loss_scale": ("fp16.loss_scale", lambda scale: scale == 0),
    "initial_dynamic_scale": ("fp16.initial_scale_power", lambda power: 2.0**power),
    "zero_optimization": ("zero_optimization.stage", lambda stage: stage > 0),
    "zero_optimization_partition_gradients": ("zero_optimization.stage", lambda stage: stage >= 2),
    "zero_optimization_partition_weights": ("zero_optimization.stage", lambda stage: stage >= 3),
    "zero_cpu_offload": ("zero_optimization.offload_optimizer", lambda block: _device(block) == "cpu"),
    "zero_use_cpu_optimizer": ("zero_optimization.offload_optimizer", lambda block: _device(block) != "none"),
    "zero_nvme_offload_optimizer": ("zero_optimization.offload_optimizer", lambda block: _device(block) == "nvme"),
    "zero_partial_offload": ("zero_optimization.offload_optimizer", lambda block: 1.0 if block is None else block.ratio),
    "get_data_types": ("data_types", lambda block: (block.param_dtype, block.grad_accum_dtype)),
    "is_deepcompile_enabled": ("compile.deepcompile", bool),
    "super_offload": ("zero_optimization.offload_optimizer", lambda block: block is not None and block.super_offload),
    "zenflow_config": ("zero_optimization.zenflow", lambda block: block),
    "checkpoint_tag_validation_enabled": ("checkpoint.tag_validation", lambda mode: mode.lower() != "ignore"),
    "checkpoint_tag_validation_fail": ("checkpoint.tag_validation", lambda mode: mode.lower() == "fail"),
    "random_ltd_enabled": ("data_efficiency.enabled", lambda _: False),  # not built yet, so its switch is an error
    "curriculum_learning_enabled": ("data_efficiency.enabled", lambda _: False),
    "autotp_size": ("tensor_parallel.autotp_size", int),
}


def _device(block: Any) -> str:
    """Where an offload block puts things; "none" without a block."""
    return "none" if block is None else str(block.device)


def _method(name: str, path: str, convert: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    read = operator.attrgetter(path)

    def answer(self: ConfigAccess) -> Any:
        value = read(self._config)
        return value if convert is None else convert(value)

    answer.__name__ = name
    answer.__qualname__ = f"ConfigAccess.{name}"
    answer.__doc__ = f"`{path}` of the config."
    return answer


class ConfigAccess:
    """Mixin with one method per row of the tables above."""

    _config: DeepSpeedConfig


for _name, _path in _PATHS.items():
    setattr(ConfigAccess, _name, _method(_name, _path, None))
for _name, (_path, _convert) in _DERIVED.items():
    setattr(ConfigAccess, _name, _method(_name, _path, _convert))
