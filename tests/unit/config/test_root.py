"""A whole configuration."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ArgumentError, BatchSizeError, ConfigError, UnbuiltFeatureError

CLIENT: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "train_batch_size": 16,
    "steps_per_print": math.inf,
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 0,
        "offload_optimizer": {"device": "none", "nvme_path": None},
        "offload_param": {"device": "none", "nvme_path": None, "buffer_size": "auto"},
        "stage3_prefetch_bucket_size": 0.9 * 10 * 10,
        "stage3_gather_16bit_weights_on_model_save": False,
        "reduce_bucket_size": "auto",
        "sub_group_size": "auto",
    },
    "fp16": {"enabled": False},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": None},
    "activation_checkpointing": {
        "partition_activations": False,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": False,
        "synchronize_checkpoint_boundary": False,
    },
    "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True, "thread_count": 1},
    "compile": {"disable": False, "backend": "inductor"},
    "zero_allow_untested_optimizer": True,
}


def build(**given: Any) -> DeepSpeedConfig:
    return DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **given})


def refusal(**given: Any) -> str:
    with pytest.raises(ConfigError) as error:
        build(**given)
    return str(error.value)


def test_what_clients_send_is_accepted_and_not_changed() -> None:
    before = copy.deepcopy(CLIENT)
    config = DeepSpeedConfig(CLIENT, dp_world_size=2)
    assert before == CLIENT
    assert config.raw == CLIENT
    assert config.raw is not CLIENT
    assert config.steps_per_print is None
    assert config.zero_optimization.prefetch_bucket_size == 90
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.aio.intra_op_parallelism == 1


@pytest.mark.parametrize(
    ("given", "path", "nearest"),
    [
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation", "zero_optimization"),
        ({"gradient_acumulation_steps": 4}, "gradient_acumulation_steps", "gradient_accumulation_steps"),
        ({"zero_optimization": {"overlap_coms": True}}, "zero_optimization.overlap_coms", "overlap_comm"),
        ({"fp16": {"initial_scale_powr": 4}}, "fp16.initial_scale_powr", "initial_scale_power"),
        ({"zero_optimization": {"ofload_optimizer": {}}}, "zero_optimization.ofload_optimizer", "offload_optimizer"),
        ({"optimizer": {"type": "AdamW", "params": {"lrr": 1e-3}}}, "optimizer.params.lrr", "lr"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}},
            "scheduler.params.warmup_steps",
            "warmup_num_steps",
        ),
        ({"monitor_config": {"tensorbord": {}}}, "monitor_config.tensorbord", "tensorboard"),
        ({"checkpoint": {"writer": {"typ": "FAST"}}}, "checkpoint.writer.typ", "type"),
    ],
)
def test_an_unknown_key_is_refused_at_every_level_with_the_nearest(given: dict[str, Any], path: str, nearest: str) -> None:
    text = refusal(**given)
    assert f"{path} = " in text
    assert f'Did you mean "{nearest}"?' in text


@pytest.mark.parametrize(
    ("given", "start"),
    [
        (
            {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/disk", "buffer_count": "many"}}},
            'zero_optimization.offload_param.buffer_count = "many": needed a whole number',
        ),
        (
            {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.2}}},
            'zero_optimization.zenflow = {...}: needed offload_optimizer.device "cpu"',
        ),
        ({"zero_optimisation": {"stage": 2, "offload_param": {"device": "cpu"}}}, "zero_optimisation = {...}: unknown key"),
        ({"wandb": {}, "monitor_config": {"wandb": {"team": "ours"}}}, 'monitor_config.wandb = {...}: "wandb" and'),
        ({"fp16": {"enabled": {}}}, "fp16.enabled = {}: needed true or false"),
    ],
)
def test_a_refusal_shows_the_value_of_a_key_and_no_block_around_or_below_it(given: dict[str, Any], start: str) -> None:
    assert refusal(**given).partition("1. ")[2].startswith(start)


def test_a_key_of_a_block_written_beside_it_is_that_key_unless_the_block_says_otherwise() -> None:
    # as TRL has it for reference models: on top of what Accelerate has filled in, under either spelling, as a float
    block = {"stage": 3, "prefetch_bucket_size": 7}
    beside = {"zero_optimization.stage3_prefetch_bucket_size": 921.6, "zero_optimization.reduce_bucket_size": 1024}
    found = DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": block, **beside}).zero_optimization
    assert (found.stage, found.prefetch_bucket_size, found.reduce_bucket_size) == (3, 7, 1024)
    alone = DeepSpeedConfig({"train_batch_size": 1, "zero_optimization.stage3_prefetch_bucket_size": 921.6})
    assert alone.zero_optimization.prefetch_bucket_size == 921
    assert block == {"stage": 3, "prefetch_bucket_size": 7}
    wrong = refusal(**{"zero_optimization.reduce_bucket_size": "big", "zero_optimization.bucket": 1})
    assert 'zero_optimization.reduce_bucket_size = "big": needed' in wrong
    assert "zero_optimization.bucket = 1: unknown key of the top level" in wrong


def test_a_key_in_the_wrong_block_is_sent_home() -> None:
    assert '"stage" is a key of zero_optimization: move it there.' in refusal(stage=0)
    assert '"gradient_clipping" is a key of the top level' in refusal(zero_optimization={"gradient_clipping": 1.0})
    assert '"offload_param" is a key of zero_optimization' in refusal(offload_param={})


def test_every_fault_is_reported_at_once() -> None:
    text = refusal(
        train_batch_size=7,
        gradient_accumulation_steps=2,
        optimiser={},
        gradient_clipping=-1,
        zero_optimization={"stage": 2, "mics_shard_size": 8, "offload_param": {"device": "nvme"}},
        fp16={"enabled": True, "hysteresis": -1},
        bfloat16={"enabled": True, "x": 1},
        monitor_config={"wandb": {"enabled": "perhaps"}},
        optimizer={"type": "Lamb", "params": {"lr": "auto", "betas": [1, 2]}},
        progressive_layer_drop={"enabled": True},
    )
    paths = [
        "optimiser",
        "gradient_clipping",
        "zero_optimization.offload_param.nvme_path",
        "fp16.hysteresis",
        "bfloat16.x",
        "monitor_config.wandb.enabled",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "bf16.enabled",
        "zero_optimization.mics_shard_size",
        "progressive_layer_drop.enabled",
    ]
    assert text.startswith("12 faults in the configuration")
    for path in paths:
        assert f". {path} = " in text, path
    assert "Check batch related parameters" in text


def test_a_nodes_own_folder_is_not_copied_to_the_tier_that_stays() -> None:
    checkpoint = {"use_node_local_storage": True}
    with pytest.raises(ConfigError, match=r"checkpoint\.use_node_local_storage = true"):
        build(checkpoint=checkpoint, nebula={"enabled": True, "persistent_storage_path": "/x"})
    build(checkpoint=checkpoint, nebula={"enabled": True})
    build(checkpoint=checkpoint, nebula={"enabled": False, "persistent_storage_path": "/x"})


def test_the_class_of_the_error_follows_its_faults() -> None:
    with pytest.raises(BatchSizeError):
        build(train_batch_size=7, gradient_accumulation_steps=2, fp16={"x": 1})
    with pytest.raises(UnbuiltFeatureError):
        build(progressive_layer_drop={"enabled": True})
    with pytest.raises(ConfigError) as error:
        build(progressive_layer_drop={"enabled": True}, x=1)
    assert type(error.value) is ConfigError
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    "given",
    [
        {"train_micro_batch_size_per_gpu": 0},
        {"gradient_accumulation_steps": -1},
        {"train_batch_size": math.nan},
        {"train_batch_size": True},
        {"gradient_clipping": -1.0},
        {"gradient_clipping": math.nan},
        {"gradient_clipping": math.inf},
        {"gradient_predivide_factor": 0},
        {"steps_per_print": -1},
        {"steps_per_print": 2.5},
        {"steps_per_print": math.nan},
        {"communication_data_type": "int8"},
        {"gradient_allreduce_op": "max"},
        {"log_level": "loud"},
        {"vocabulary_size": 0},
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": {"stage": True}},
        {"zero_optimization": {"reduce_bucket_size": 0}},
        {"zero_optimization": {"sub_group_size": -1}},
        {"zero_optimization": {"offload_param": {"device": "nvme"}}},
        {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": ""}}},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        {"zero_optimization": {"zenflow": {"topk_ratio": 0.0}}},
        {"zero_optimization": {"zenflow": {"select_interval": 3}}},
        {"zero_optimization": {"compute_grad_norm": False}},
        {"zero_optimization": {"legacy_stage1": True}},
        {"fp16": {"enabled": True, "loss_scale_window": 0}},
        {"fp16": {"enabled": True, "hysteresis": -1}},
        {"fp16": {"enabled": True, "min_loss_scale": -2}},
        {"fp16": {"enabled": True, "min_loss_scale": 2, "initial_scale_power": 0}},
        {"fp16": {"loss_scale": -1}},
        {"fp16": {"loss_scale": True}},
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
        {"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}},
        {"torch_autocast": {"enabled": True, "dtype": "int8"}},
        {"torch_autocast": {"dtype": "complex"}},
        {"torch_autocast": {"lower_precision_safe_modules": [3]}},
        {"data_types": {"grad_accum_dtype": "int8"}},
        {"data_types": {"keep_in_fp32_modules": "some"}},
        {"checkpoint": {"tag_validation": "maybe"}},
        {"checkpoint": {"parallel_write": {"pipeline_stage": "x"}}},
        {"activation_checkpointing": {"contiguous_memory_optimization": True}},
        {"activation_checkpointing": {"offload": {"device": "nvme"}}},
        {"activation_checkpointing": {"cpu_checkpointing": True, "offload": {"device": "nvme", "nvme_path": "/tmp"}}},
        {
            "activation_checkpointing": {
                "partition_activations": True,
                "contiguous_memory_optimization": True,
                "number_checkpoints": 2,
                "offload": {"device": "nvme", "nvme_path": "/tmp"},
            }
        },
        {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}},
        {"expert_parallel": {"load_balance_coeff": 0.1}},
        {"expert_parallel": {"expert_tensor_parallel_size": 2}},
        {"compile": {"passes": ["autotp", "z3"]}},
        {"compile": {"offload_activation": True, "offload_parameters": True}},
        {"sparse_attention": {"mode": "dense", "num_random_blocks": 2}},
        {"elasticity": {"enabled": True}},
        {"elasticity": {"version": 0.3}},
        {"elasticity": {"micro_batch_sizes": [0]}},
        {"autotuning": {"results_dir": ""}},
        {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}},
        {"data_efficiency": {"data_routing": {"random_ltd": {"enabled": True}}}},
        {"curriculum_learning": {"enabled": True}},
        {"compression_training": {"row_pruning": {"shared_parameters": {"enabled": True}}}},
        {"compression_training": {"sparse_pruning": {"different_groups": {"g": {"params": {"dense_ratio": 1.5}}}}}},
        {"optimizer": {}},
        {"optimizer": {"type": "not a name"}},
        {"optimizer": {"type": "Adam", "params": [1]}},
        {"scheduler": {"type": "WarmupDecayLR"}},
        {"fp16": True},
        {"timers": {"throughput": {"enabled": 7}}},
        {"data_parallel_size": 3, "train_batch_size": 1},
    ],
)
def test_a_senseless_value_is_refused(given: dict[str, Any]) -> None:
    text = refusal(**given)
    assert "not built yet" not in text or len(text.splitlines()) > 2


@pytest.mark.parametrize(
    "given",
    [
        {"fp16": {"enabled": False, "loss_scale_window": 0, "hysteresis": 0, "min_loss_scale": 0}},
        {"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 0}},
        {"bf16": {"enabled": False, "bf16_master_weights_and_grads": True}},
        {"torch_autocast": {"enabled": False, "dtype": "fp32"}},
        {"nebula": {"enabled": False, "persistent_storage_path": "/x"}},
        {"elasticity": {"enabled": False, "max_train_batch_size": 4}},
        {"curriculum_learning": {"enabled": False}},
        {"flops_profiler": {"enabled": False, "detailed": False}},
        {"hybrid_engine": {"enabled": False, "max_out_tokens": 256}},
        {"activation_checkpointing": {}},
        {"pipeline": {}},
        {"tensor_parallel": {"autotp_size": 1}},
        {"datastates_ckpt": False},
        {"data_states": None},
        {"weight_quantization": {"enabled": False}},
        {"compression_training": {"layer_reduction": {"enabled": False}}},
        {"zero_optimization": {"stage": 0, "zero_quantized_weights": True, "overlap_comm": True}},
        {"zero_optimization": None},
        {"scheduler": None, "optimizer": None, "fp16": "auto"},
        {"steps_per_print": 0},
        {"zero_optimization": {"sub_group_size": 0}},
        {"dump_state": 1},
    ],
)
def test_what_asks_for_nothing_is_accepted(given: dict[str, Any]) -> None:
    build(**given)


@pytest.mark.parametrize(
    ("key", "value", "because"),
    [
        ("top_k", 2, "router's own"),
        ("route_norm", True, "router's own"),
        ("route_scale", 2.5, "router's own"),
        ("routed_scaling_factor", 1.0, "router's own"),
        ("score_apply", "pre", "router's own"),
        ("score_func", "sigmoid", "router's own"),
        ("num_expert_groups", 4, "router's own"),
        ("num_limited_groups", 2, "router's own"),
        ("top_k_attr", "num_experts_per_tok", "router's own"),
        ("expert_w3", "w3", "experts' own"),
        ("expert_activation", "silu", "experts' own"),
        ("has_shared_experts", True, "blocks' own"),
        ("shared_experts_pattern", "shared", "blocks' own"),
        ("shared_experts_gate_pattern", "gate", "blocks' own"),
        ("comm_backend", "deepep", "not built yet"),
        ("comm_num_sm", 24, "not built yet"),
        ("comm_qp_margin", 0, "not built yet"),
        ("comm_max_tokens_per_rank", 8, "not built yet"),
        ("async_split_plan", True, "not built yet"),
        ("validate_folding_routing", True, "not built yet"),
        ("combine_impl", "legacy_bmm", "the one way there is"),
        ("row_weighting_impl", "fused", "not built yet"),
        ("moe_layer_pattern", "*.mlp", "needed a regular expression (nothing to repeat"),
    ],
)
def test_what_auto_ep_cannot_use_is_refused_once_it_is_on(key: str, value: Any, because: str) -> None:
    text = refusal(expert_parallel={"enabled": True, key: value})
    assert f"expert_parallel.{key}" in text
    assert because in text
    build(expert_parallel={"enabled": False, key: value})


def test_auto_ep_with_its_own_keys_is_accepted() -> None:
    build(expert_parallel={"enabled": True, "autoep_size": 2, "preset_model": "mixtral", "use_grouped_mm": False})
    build(expert_parallel={"enabled": True, "combine_impl": "weighted_sum", "row_weighting_impl": "eager"})


@pytest.mark.parametrize(
    "key", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"]
)
def test_a_left_over_auto_says_who_fills_it(key: str) -> None:
    text = refusal(**{key: "auto"})
    assert f'{key} = "auto"' in text
    assert "Hugging Face Trainer or Accelerate" in text


def test_auto_means_the_default_where_there_is_one() -> None:
    config = build(prescale_gradients="auto", bf16={"enabled": "auto"}, zero_optimization={"stage": "auto"})
    assert (config.prescale_gradients, config.bf16.enabled, config.zero_optimization.stage) == (False, False, 0)


def test_numbers_may_come_as_integral_floats_and_texts() -> None:
    config = DeepSpeedConfig({"train_batch_size": "8", "zero_optimization": {"stage": "0", "reduce_bucket_size": 5e8}})
    assert config.train_batch_size == 8
    assert config.zero_optimization.reduce_bucket_size == 500_000_000


def test_both_spellings_of_a_key_and_block_are_accepted() -> None:
    assert build(bfloat16={"enabled": True}).bf16.enabled
    assert build(bf16={"check_overflow": False}).bf16.check_grad_overflow is False
    assert build(bf16={"check_grad_overflow": False}).bf16.check_grad_overflow is False
    assert build(aio={"thread_count": 3}).aio.intra_op_parallelism == 3
    assert build(zero_optimization={"max_live_parameters": 3}).zero_optimization.max_live_parameters == 3
    assert build(zero_optimization={"stage3_max_live_parameters": 3}).zero_optimization.max_live_parameters == 3
    datastates = build(data_states={"host_cache_size": 4}).datastates_ckpt
    assert datastates is not None
    assert datastates.host_cache_size == 4


def test_two_spellings_at_once_are_refused() -> None:
    assert "one block" in refusal(bf16={}, bfloat16={})
    assert "one setting" in refusal(bf16={"check_overflow": True, "check_grad_overflow": True})
    assert "one block" in refusal(tensorboard={}, monitor_config={"tensorboard": {}})


def test_monitors_may_stand_at_the_top_or_in_a_block() -> None:
    for places in ({"csv_monitor": {"job_name": "j"}}, {"monitor_config": {"csv_monitor": {"job_name": "j"}}}):
        assert build(**places).csv_monitor.job_name == "j"
    assert "block of keys" in refusal(monitor_config=3)
    assert build(monitor_config={"prometheus": {"port": 9400}}).prometheus.port == 9400
    assert "prometheus.port = 65536" in refusal(prometheus={"port": 65536})


def test_deprecated_keys_are_moved() -> None:
    zero = build(zero_optimization={"cpu_offload": True, "cpu_offload_use_pin_memory": True}).zero_optimization
    assert zero.offload_optimizer is not None
    assert (zero.offload_optimizer.device, zero.offload_optimizer.pin_memory) == ("cpu", True)
    zero = build(zero_optimization={"cpu_offload_param": True, "cpu_offload": False}).zero_optimization
    assert zero.offload_param is not None
    assert zero.offload_param.device == "cpu"
    assert zero.offload_optimizer is None
    old = {"stage3_gather_fp16_weights_on_model_save": True}
    assert build(zero_optimization=old).zero_optimization.gather_16bit_weights_on_model_save
    assert "one setting" in refusal(zero_optimization={"cpu_offload": True, "offload_optimizer": {"device": "cpu"}})


def test_the_boolean_form_of_zero_is_its_stage() -> None:
    assert build(zero_optimization=False).zero_optimization.stage == 0
    assert build(zero_optimization=True).zero_optimization.stage == 1


def test_the_old_place_of_clipping_is_read() -> None:
    config = build(optimizer={"type": "Adam", "params": {"max_grad_norm": 0.5}})
    assert config.gradient_clipping == 0.5
    assert config.optimizer is not None
    assert "max_grad_norm" not in config.optimizer.params
    assert build(optimizer={"type": "SGD", "params": {"lr": 1, "max_grad_norm": 2}}).gradient_clipping == 2
    both = {"type": "Adam", "params": {"max_grad_norm": 0.5}}
    assert "both say" in refusal(gradient_clipping=1.0, optimizer=both)
    assert build(gradient_clipping=0.5, optimizer=both).gradient_clipping == 0.5
    assert "needed a number >= 0" in refusal(optimizer={"type": "SGD", "params": {"max_grad_norm": "x"}})


def test_properties_under_old_names() -> None:
    config = build(bf16={"enabled": True})
    assert config.zero_config is config.zero_optimization
    assert (config.zero_enabled, config.zero_optimization_stage) == (False, 0)
    assert (config.fp16_enabled, config.bfloat16_enabled) == (False, True)


class Mpu:
    def get_data_parallel_world_size(self) -> int:
        return 3


class SequenceMpu:
    def get_sequence_parallel_world_size(self) -> int:
        return 2


class Mesh:
    mesh_dim_names: tuple[str, ...] | None = ("sequence_parallel", "data_parallel")

    def size(self, mesh_dim: int) -> int:
        return (2, 4)[mesh_dim]


@pytest.mark.parametrize(
    ("places", "ranks"),
    [
        ({}, 1),
        ({"dp_world_size": 5, "mpu": Mpu()}, 5),
        ({"mpu": Mpu(), "world_size": 6}, 3),
        ({"mpu": SequenceMpu(), "world_size": 6}, 3),
        ({"mesh_device": Mesh()}, 4),
        ({"world_size": 6}, 6),
    ],
)
def test_the_data_parallel_ranks_come_from_whoever_knows(places: dict[str, Any], ranks: int) -> None:
    config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 2}, **places)
    assert config.train_batch_size == 2 * ranks
    assert config.gradient_accumulation_steps == 1


def test_a_world_size_that_sequences_do_not_divide_is_refused() -> None:
    with pytest.raises(ArgumentError, match="multiple of 2"):
        DeepSpeedConfig({"train_batch_size": 2}, mpu=SequenceMpu(), world_size=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="no world size"):
        DeepSpeedConfig({"train_batch_size": 2}, mpu=SequenceMpu())  # type: ignore[arg-type]


def test_a_mesh_without_a_data_parallel_dimension_is_refused() -> None:
    mesh = Mesh()
    mesh.mesh_dim_names = ("x", "y")
    with pytest.raises(ArgumentError, match='needed one named "data_parallel"'):
        DeepSpeedConfig({"train_batch_size": 2}, mesh_device=mesh)


def test_a_copy_is_equal_and_apart() -> None:
    config = build(fp16={"enabled": True})
    copied = copy.deepcopy(config)
    assert copied.resolved() == config.resolved()
    copied.fp16.hysteresis = 5
    assert config.fp16.hysteresis == 2


@given(micro=st.integers(1, 16), steps=st.integers(1, 8), ranks=st.integers(1, 8))
def test_a_resolved_configuration_is_its_own_fixed_point(micro: int, steps: int, ranks: int) -> None:
    source = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "optimizer": {"type": "adamw", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 4}},
    }
    resolved = DeepSpeedConfig(source, dp_world_size=ranks).resolved()
    reread = json.loads(json.dumps({key: value for key, value in resolved.items() if value is not None}))
    reread.pop("sparse_attention", None)
    assert DeepSpeedConfig(reread, dp_world_size=ranks).resolved() == resolved


def test_a_configuration_needs_neither_torch_nor_the_blocks_it_does_not_use() -> None:
    code = (
        "import sys; from deepspeed.config import DeepSpeedConfig\n"
        "DeepSpeedConfig({'train_batch_size': 1, 'bf16': {'enabled': True}})\n"
        "names = ('torch', 'hjson', 'deepspeed.config.compression', 'deepspeed.config.data', 'deepspeed.config.reference')\n"
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
