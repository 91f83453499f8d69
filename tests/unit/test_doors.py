from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import deepspeed.module_inject
import deepspeed.runtime
import deepspeed.utils
from deepspeed.topology import groups
from deepspeed.zero import init_context

DOORS = sorted(
    module.name
    for package in (deepspeed.module_inject, deepspeed.runtime, deepspeed.utils)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
)
DOTTED = [
    "deepspeed.comm.get_rank",
    "deepspeed.accelerator.get_accelerator",
    "deepspeed.ops.adam.DeepSpeedCPUAdam",
    "deepspeed.ops.adam.FusedAdam",
    "deepspeed.checkpointing._CUDA_RNG_STATE_TRACKER",
    "deepspeed.checkpointing._set_cuda_rng_state",
    "deepspeed.checkpointing.configure",
    "deepspeed.module_inject.AutoTPPresets.llama",
    "deepspeed.monitor.monitor.MonitorMaster",
    "deepspeed.module_inject.layers.GatherReplacedLayerParams",
    "deepspeed.runtime.activation_checkpointing.checkpointing.checkpoint",
    "deepspeed.runtime.base_optimizer.DeepSpeedOptimizer",
    "deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine",
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine.TorchCheckpointEngine",
    "deepspeed.runtime.config.DeepSpeedConfig",
    "deepspeed.runtime.config.DeepSpeedConfigError",
    "deepspeed.runtime.config_utils.DeepSpeedConfigModel",
    "deepspeed.runtime.constants.TRAIN_BATCH_SIZE",
    "deepspeed.runtime.dataloader.RepeatingLoader",
    "deepspeed.runtime.engine.DeepSpeedEngine",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES",
    "deepspeed.pipe.TiedLayerSpec",
    "deepspeed.runtime.pipe.PipelineModule",
    "deepspeed.runtime.pipe.engine.PipelineEngine",
    "deepspeed.runtime.pipe.module.LayerSpec",
    "deepspeed.runtime.pipe.schedule.TrainSchedule",
    "deepspeed.runtime.pipe.topology.PipelineParallelGrid",
    "deepspeed.runtime.pipe.topology.ProcessTopology",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp.initialize_sequence_parallel",
    "deepspeed.runtime.chunked_cross_entropy.chunked_cross_entropy",
    "deepspeed.runtime.sequence_parallel.ulysses_sp.TiledFusedLogitsLoss",
    "deepspeed.runtime.sequence_parallel.ulysses_sp.TiledMLP.apply",
    "deepspeed.runtime.sequence_parallel.ulysses_sp.sequence_tiled_compute",
    "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF.register_with_transformers",
    "deepspeed.runtime.utils.clip_grad_norm_",
    "deepspeed.runtime.utils.move_to_device",
    "deepspeed.runtime.utils.partition_balanced",
    "deepspeed.runtime.utils.see_memory_usage",
    "deepspeed.runtime.utils.set_random_seed",
    "deepspeed.runtime.zero.GatheredParameters",
    "deepspeed.runtime.zero.Init",
    "deepspeed.runtime.zero.config.DeepSpeedZeroConfig",
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum.cpu",
    "deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum.optim_states",
    "deepspeed.runtime.zero.partition_parameters.ZeroParamStatus.NOT_AVAILABLE",
    "deepspeed.runtime.zero.partition_parameters._orig_torch_arange",
    "deepspeed.runtime.zero.partition_parameters.get_accelerator",
    "deepspeed.runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor",
    "deepspeed.runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_live",
    "deepspeed.runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold",
    "deepspeed.runtime.zero.tiling.TiledLinear",
    "deepspeed.sequence.cross_entropy.vocab_sequence_parallel_cross_entropy",
    "deepspeed.sequence.layer.DistributedAttention",
    "deepspeed.utils.RepeatingLoader",
    "deepspeed.utils.groups._get_sequence_parallel_group",
    "deepspeed.utils.groups.get_data_parallel_group",
    "deepspeed.utils.log_dist",
    "deepspeed.utils.logger",
    "deepspeed.utils.logging.logger",
    "deepspeed.utils.safe_get_local_grad",
    "deepspeed.utils.set_z3_leaf_modules",
    "deepspeed.utils.tensor_fragment.safe_get_full_grad",
    "deepspeed.utils.timer.NoopTimer",
    "deepspeed.utils.timer.SynchronizedWallClockTimer",
    "deepspeed.zero.GatheredParameters",
    "deepspeed.zero.Init",
    "deepspeed.zero.TiledLinearReturnBias",
    "deepspeed.zero.ZeroParamStatus.AVAILABLE",
    "deepspeed.zero.ZeroParamType.REMOTE",
    "deepspeed.zero.partition_parameters.unregister_external_parameter",
    "deepspeed.zero.register_external_parameter",
    "deepspeed.zero.unwrap_model_for_generation",
]


def _file(name: str) -> Path:
    """Of the door itself, which may stand for another module once imported."""
    path = Path(deepspeed.__file__).parent.parent.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@pytest.mark.parametrize("name", DOORS)
def test_every_name_behind_a_door_resolves(name: str) -> None:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", None) or [n for n in vars(module) if n.isupper()]
    assert public
    for attribute in public:
        assert getattr(module, attribute) is not None or attribute.endswith("_DEFAULT")


@pytest.mark.parametrize("name", DOORS)
def test_a_door_defines_nothing_itself(name: str) -> None:
    tree = ast.parse(_file(name).read_text())
    kinds = {type(node) for node in ast.walk(tree)}
    assert not kinds & {ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.For}
    conditions = {ast.unparse(node.test) for node in ast.walk(tree) if isinstance(node, ast.If)}
    assert conditions <= {"TYPE_CHECKING", "__name__ == '__main__'"}  # lazy names for type checkers; doors that are commands


@pytest.mark.parametrize("path", DOTTED)
def test_dotted_access_works_when_only_the_package_was_imported(path: str) -> None:
    """Here the modules may be loaded already; the whole list is tried once in a fresh process below."""
    value: object = deepspeed
    for part in path.split(".")[1:]:
        value = getattr(value, part)
    assert value is not None


def test_dotted_access_works_in_a_fresh_process_and_prints_nothing() -> None:
    code = "import deepspeed\n" + "\n".join(DOTTED)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_function_replaced_behind_the_groups_door_is_replaced_in_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    door = importlib.import_module("deepspeed.utils.groups")
    monkeypatch.setattr(door, "get_data_parallel_rank", lambda: 41)
    assert groups.get_data_parallel_rank() == 41
    assert deepspeed.utils.groups is groups


def test_a_function_replaced_behind_the_partition_parameters_door_is_replaced_in_the_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    door = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    assert door is init_context is deepspeed.zero.partition_parameters is deepspeed.runtime.zero.partition_parameters

    def replaced() -> None: ...

    monkeypatch.setattr(door, "zero_wrapper_for_fp_tensor_constructor", replaced)
    assert init_context.zero_wrapper_for_fp_tensor_constructor is replaced


def test_what_is_set_behind_the_checkpointing_door_is_set_in_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    door = importlib.import_module("deepspeed.runtime.activation_checkpointing.checkpointing")
    assert door is deepspeed.checkpointing is deepspeed.runtime.activation_checkpointing.checkpointing
    monkeypatch.setattr(door, "_CUDA_RNG_STATE_TRACKER", "theirs")
    assert deepspeed.checkpointing.get_cuda_rng_tracker() == "theirs"


def test_names_of_later_features_say_that_they_are_not_built() -> None:
    for name in ("deepspeed.zero.MiCS_Init", "deepspeed.init_inference"):
        module, attribute = name.rsplit(".", 1)
        with pytest.raises(AttributeError, match="not built yet"):
            getattr(importlib.import_module(module), attribute)


def test_the_question_about_leaf_modules_is_found_beside_the_module_of_its_name() -> None:
    code = """
import deepspeed, torch
assert not deepspeed.utils.z3_leaf_module(torch.nn.Linear(1, 1))
from deepspeed.utils.z3_leaf_module import set_z3_leaf_module
assert not deepspeed.utils.z3_leaf_module(torch.nn.Linear(1, 1))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_both_ways_to_one_object_lead_to_the_same_one() -> None:
    assert deepspeed.utils.logger is deepspeed.utils.logging.logger is deepspeed.logger
    assert deepspeed.zero.Init is deepspeed.runtime.zero.Init is init_context.Init
    assert deepspeed.runtime.engine.DeepSpeedEngine is deepspeed.DeepSpeedEngine
    assert deepspeed.runtime.config.DeepSpeedConfigError is deepspeed.DeepSpeedConfigError
