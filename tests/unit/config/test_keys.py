"""Every documented key: its default, and that its documented values are accepted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed.config import DeepSpeedConfig
from deepspeed.config.blocks import blocks_of, load_model
from deepspeed.config.optimizer import KNOWN_OPTIMIZERS
from deepspeed.config.scheduler import KNOWN_SCHEDULES
from deepspeed.config.walk import sections

# Key -> (default, values that are accepted). Features that are not built yet are accepted by the models alone.
TOP: dict[str, tuple[Any, list[Any]]] = {
    "managed_gradient_accumulation": (True, [False]),
    "steps_per_print": (None, [1, 10, None]),
    "dump_state": (False, [True]),
    "wall_clock_breakdown": (False, [True]),
    "memory_breakdown": (False, [True]),
    "dataloader_drop_last": (False, [True]),
    "log_level": (None, ["debug", "info", "warning", "error", "critical"]),
    "disable_python_gc": (False, [True]),
    "gradient_clipping": (0.0, [0, 1.0, 0.5]),
    "prescale_gradients": (False, [True]),
    "gradient_predivide_factor": (1.0, [2.0]),
    "gradient_allreduce_op": ("mean", ["sum", "mean"]),
    "communication_data_type": (None, ["fp16", "bf16", "fp32"]),
    "seq_parallel_communication_data_type": ("fp32", ["fp16", "bf16", None]),
    "sparse_gradients": (False, [True]),
    "disable_allgather": (False, [True]),
    "vocabulary_size": (None, [1024, 50257]),
    "zero_allow_untested_optimizer": (False, [True]),
    "zero_force_ds_cpu_optimizer": (True, [False]),
    "sequence_parallel_size": (1, [1]),
    "data_parallel_size": (None, [1]),
    "allgather_size": (500_000_000, [1000]),
    "graph_harvesting": (False, [False]),
    "use_data_before_expert_parallelism": (False, [False]),
}

OFFLOAD = {"device": ("none", ["none", "cpu"]), "nvme_path": (None, ["/local_nvme"]), "pin_memory": (False, [True])}
GROUP = {"modules": (["*"], [["attention"], "attention"]), "related_modules": (None, [[["output"]]])}
PARALLEL_SAMPLING = "data_efficiency.data_sampling"
COMPRESSION = "compression_training"

BLOCKS: dict[str, dict[str, tuple[Any, list[Any]]]] = {
    "optimizer": {"legacy_fusion": (False, [True])},
    "fp16": {
        "enabled": (False, [True]),
        "auto_cast": (False, [True]),
        "loss_scale": (0.0, [128, 0, 1.5]),
        "initial_scale_power": (16, [0, 32]),
        "loss_scale_window": (1000, [1]),
        "hysteresis": (2, [1]),
        "consecutive_hysteresis": (False, [True]),
        "min_loss_scale": (1.0, [2]),
        "fp16_master_weights_and_grads": (False, [True]),
    },
    "bf16": {
        "enabled": (False, [True]),
        "immediate_grad_update": (True, [False]),
        "check_grad_overflow": (True, [False]),
        "bf16_master_weights_and_grads": (False, [True]),
        "bf16_optimizer_states": (False, [True]),
    },
    "torch_autocast": {
        "enabled": (False, [True]),
        "dtype": (None, ["float16", "half", "bf16", "torch.bfloat16", "fp32", "int8"]),
        "lower_precision_safe_modules": (None, [["torch.nn.modules.linear.Linear"]]),
    },
    "data_types": {
        "grad_accum_dtype": (None, ["fp16", "bf16", "fp32", None]),
        "param_dtype": (None, ["fp32"]),
        "buffer_dtype": (None, ["bf16"]),
        "keep_in_fp32_modules": ("auto", [[], ["*.norm"], "auto"]),
    },
    "amp": {"enabled": (False, [True]), "opt_level": (None, ["O1"])},
    "zero_optimization": {
        "stage": (0, [0, 1, 2, 3]),
        "contiguous_gradients": (True, [False]),
        "reduce_scatter": (True, [False]),
        "reduce_bucket_size": (500_000_000, [1, 5e8]),
        "use_multi_rank_bucket_allreduce": (True, [False]),
        "allgather_partitions": (True, [False]),
        "allgather_bucket_size": (500_000_000, [3]),
        "overlap_comm": (None, [True, False]),
        "compute_grad_norm": (True, [True]),
        "load_from_fp32_weights": (True, [False]),
        "elastic_checkpoint": (False, [True]),
        "offload_param": (None, [{}]),
        "offload_optimizer": (None, [{}]),
        "zenflow": (None, [{}]),
        "sub_group_size": (1_000_000_000, [1, 0]),
        "prefetch_bucket_size": (50_000_000, [0, 0.9e6]),
        "param_persistence_threshold": (100_000, [0]),
        "model_persistence_threshold": (sys.maxsize, [0]),
        "max_live_parameters": (1_000_000_000, [0]),
        "max_reuse_distance": (1_000_000_000, [0]),
        "gather_16bit_weights_on_model_save": (False, [True]),
        "module_granularity_threshold": (0, [100]),
        "use_all_reduce_for_fetch_params": (False, [True]),
        "allgather_sequential": (False, [True]),
        "ignore_unused_parameters": (True, [False]),
        "legacy_stage1": (False, [False]),
        "round_robin_gradients": (False, [True]),
        "parameter_alignment": (False, [True]),
        "zero_hpz_partition_size": (1, [8]),
        "zero_quantized_weights": (False, [True]),
        "zero_quantized_nontrainable_weights": (False, [True]),
        "zero_quantized_gradients": (False, [True]),
        "zeropp_loco_param": (None, [{"err_beta": 0.5, "reset_T": 10}]),
        "mics_shard_size": (-1, [2]),
        "mics_hierarchical_params_gather": (False, [True]),
        "memory_efficient_linear": (True, [False]),
        "pipeline_loading_checkpoint": (False, [True]),
        "override_module_apply": (True, [False]),
        "log_trace_cache_warnings": (False, [True]),
        "enable_sanity_checks": (False, [True]),
        "save_muon_momentum_buffer_in_memory": (False, [True]),
        "leaf_module": ({}, [{"classes": "Block"}]),
    },
    "zero_optimization.offload_param": {
        **OFFLOAD,
        "buffer_count": (5, [0]),
        "buffer_size": (100_000_000, [1e8]),
        "max_in_cpu": (1_000_000_000, [0]),
    },
    "zero_optimization.offload_optimizer": {
        **OFFLOAD,
        "buffer_count": (4, [0]),
        "pipeline_read": (False, [True]),
        "pipeline_write": (False, [True]),
        "fast_init": (False, [True]),
        "ratio": (1.0, [0.0, 0.4]),
        "super_offload": (False, [True]),
        "cpuadam_cores_perc": (0.8, [0, 1]),
    },
    "zero_optimization.zenflow": {
        "topk_ratio": (0.1, [0.5]),
        "select_strategy": ("auto", ["auto"]),
        "select_interval": ("auto", ["auto"]),
        "update_interval": ("auto", ["auto", 4]),
        "overlap_step": (False, [True]),
        "offload": (False, [True]),
        "auto_ratio": (0.99, [0, 1]),
        "full_warm_up_rounds": (0, [5]),
        "pt_reserved_cores_perc": (0.5, [0.1]),
        "steps_per_epoch": (None, [100]),
    },
    "zero_optimization.zeropp_loco_param": {"err_beta": (0.8, [0, 1]), "reset_T": (1024, [1])},
    "zero_optimization.leaf_module": {"names": ([], [["a.b"]]), "name_suffixes": ([], ["mlp"])},
    "activation_checkpointing": {
        "partition_activations": (False, [True]),
        "contiguous_memory_optimization": (False, [False]),
        "cpu_checkpointing": (False, [True]),
        "number_checkpoints": (None, [4]),
        "synchronize_checkpoint_boundary": (False, [True]),
        "profile": (False, [True]),
    },
    "activation_checkpointing.offload": {
        "device": ("none", ["cpu"]),
        "nvme_path": (None, ["/tmp"]),
        "buffer_count": (2, [5]),
        "min_numel": (4096, [1]),
        "pin_memory": (True, [False]),
    },
    "aio": {
        "block_size": (1_048_576, [4096]),
        "queue_depth": (8, [32]),
        "intra_op_parallelism": (1, [8]),
        "single_submit": (False, [True]),
        "overlap_events": (True, [False]),
        "use_gds": (False, [True]),
    },
    "flops_profiler": {
        "enabled": (False, [True]),
        "recompute_fwd_factor": (0.0, [1.0]),
        "profile_step": (1, [5]),
        "module_depth": (-1, [0, 3]),
        "top_modules": (1, [3]),
        "detailed": (True, [False]),
        "output_file": (None, ["flops.txt"]),
        "peak_tflops": (None, [312.0]),
    },
    "autotuning": {
        "enabled": (False, [True]),
        "fast": (True, [False]),
        "results_dir": ("autotuning_results", ["r"]),
        "exps_dir": ("autotuning_exps", ["e"]),
        "overwrite": (True, [False]),
        "start_profile_step": (3, [1]),
        "end_profile_step": (5, [9]),
        "metric": ("throughput", ["latency", "flops", "forward", "backward", "step"]),
        "metric_path": (None, ["m.json"]),
        "tuner_type": ("gridsearch", ["random", "model_based"]),
        "tuner_early_stopping": (5, [1]),
        "tuner_num_trials": (50, [1]),
        "arg_mappings": (None, [{"train_micro_batch_size_per_gpu": "--batch"}]),
        "model_info": (None, [{}]),
        "model_info_path": (None, ["i.json"]),
        "mp_size": (1, [2]),
        "max_train_batch_size": (None, [64]),
        "min_train_batch_size": (1, [2]),
        "max_train_micro_batch_size_per_gpu": (1024, [2]),
        "min_train_micro_batch_size_per_gpu": (1, [2]),
        "num_tuning_micro_batch_sizes": (3, [1]),
    },
    "autotuning.model_info": {
        "profile": (False, [True]),
        "num_params": (None, [1000]),
        "hidden_size": (None, [64]),
        "num_layers": (None, [2]),
    },
    "comms_logger": {
        "enabled": (False, [True]),
        "prof_all": (True, [False]),
        "prof_ops": ([], [["all_reduce"]]),
        "verbose": (False, [True]),
        "debug": (False, [True]),
    },
    "timers.throughput": {"enabled": (True, [False]), "synchronized": (True, [False])},
    "tensorboard": {"enabled": (False, [True]), "output_path": ("", ["o"]), "job_name": ("DeepSpeedJobName", ["j"])},
    "csv_monitor": {"enabled": (False, [True]), "output_path": ("", ["o"]), "job_name": ("DeepSpeedJobName", ["j"])},
    "run_log": {
        "enabled": (False, [True]),
        "output_path": ("", ["o"]),
        "job_name": ("DeepSpeedJobName", ["j"]),
        "every": (1, [10]),
    },
    "wandb": {"enabled": (False, [True]), "group": (None, ["g"]), "team": (None, ["t"]), "project": ("deepspeed", ["p"])},
    "comet": {
        "enabled": (False, [True]),
        "samples_log_interval": (100, [1]),
        "project": (None, ["p"]),
        "workspace": (None, ["w"]),
        "api_key": (None, ["k"]),
        "experiment_name": (None, ["n"]),
        "experiment_key": (None, ["k"]),
        "online": (None, [True, False]),
        "mode": (None, ["get", "create", "get_or_create"]),
    },
    "mlflow": {
        "enabled": (False, [True]),
        "tracking_uri": (None, ["sqlite:///runs.db"]),
        "experiment": ("deepspeed", ["e"]),
        "run_name": (None, ["n"]),
        "run_id": (None, ["i"]),
        "tags": ({}, [{"host": "here"}]),
    },
    "aim": {
        "enabled": (False, [True]),
        "repo": (None, ["r"]),
        "experiment": ("deepspeed", ["e"]),
        "run_hash": (None, ["h"]),
    },
    "prometheus": {
        "enabled": (False, [True]),
        "host": ("127.0.0.1", ["0.0.0.0"]),
        "port": (0, [9400, "9400"]),
        "job_name": ("DeepSpeedJobName", ["j"]),
    },
    "checkpoint": {
        "async_save": (False, [True]),
        "tag_validation": ("Warn", ["Ignore", "Warn", "Fail"]),
        "load_universal": (False, [True]),
        "use_node_local_storage": (False, [True]),
        "keep_last": (None, [3]),
        "keep_every": (None, [1000]),
        "checkpoint_serialization": (True, [False]),
        "writer": (None, [{}]),
    },
    "checkpoint.parallel_write": {"pipeline_stage": (False, [True])},
    "checkpoint.writer": {
        "type": ("FAST", ["MOCK", "PYTHON"]),
        "decoupled": (False, [True]),
        "io_buffer_size": (67_108_864, [1024]),
        "io_buffer_double": (True, [False]),
        "io_multiplier": (1, [2]),
        "show_statistics": (False, [True]),
        "data_parallel": (None, ["REPLICA", "SOCKET", "MACHINE"]),
    },
    "datastates_ckpt": {"host_cache_size": (None, [16])},
    "nebula": {
        "enabled": (False, [True]),
        "nebula_load_path": (None, ["p"]),
        "enable_nebula_load": (True, [False]),
        "persistent_storage_path": (None, ["p"]),
        "persistent_time_interval": (100.0, [10]),
        "num_of_version_in_retention": (2, [5]),
    },
    "tensor_parallel": {
        "autotp_size": (0, [2]),
        "dtype": ("fp16", ["bf16", "float32"]),
        "tp_overlap_comm": (False, [True]),
        "sequence_parallel": (False, [True]),
        "partition_config": (None, [{}]),
        "preset_model": (None, ["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"]),
        "injection_policy_tuple": (None, [["a", "b"]]),
        "keep_module_on_host": (False, [True]),
        "replace_with_kernel_inject": (False, [True]),
        "vocab_parallel_lm_head": (None, [True]),
        "vocab_parallel_ce_backend": ("torch", ["liger"]),
    },
    "tensor_parallel.tensor_parallel": {
        "tp_size": (1, [2]),
        "tp_grain_size": (1, [64]),
        "mpu": (None, [None]),
        "tp_group": (None, [None]),
    },
    "tensor_parallel.partition_config": {
        "use_default_specs": (True, [False]),
        "layer_specs": ([], [[{"patterns": [".*q_proj.*"], "partition_type": "column", "shape": [[1, 1], -1]}]]),
        "embedding_partition_dim": (1, [0]),
        "lm_head_patterns": (["lm_head", "embed_out"], [["head"]]),
        "strict_mode": (False, [True]),
    },
    "expert_parallel": {
        "enabled": (False, [True]),
        "autoep_size": (1, [2]),
        "expert_tensor_parallel_size": (1, [1]),
        "preset_model": (
            None,
            ["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"],
        ),
        "moe_layer_pattern": (None, [".*mlp"]),
        "expert_pattern": (None, ["experts"]),
        "router_pattern": (None, ["gate"]),
        "use_grouped_mm": (True, [False]),
        "disable_triton_grouped_mm": (False, [True]),
        "route_norm": (None, [True]),
        "route_scale": (1.0, [2.5]),
        "routed_scaling_factor": ("auto", [1.0, "auto"]),
        "score_apply": ("auto", ["pre", "post"]),
        "score_func": ("auto", ["softmax", "sigmoid"]),
        "top_k": ("auto", [2, "auto"]),
        "combine_impl": ("auto", ["weighted_sum", "fused_weighted_sum", "legacy_bmm"]),
        "row_weighting_impl": ("auto", ["eager"]),
        "gate_up_impl": ("separate", ["fused"]),
        "comm_backend": ("comm", ["comm"]),
        "comm_num_sm": (12, [24]),
        "comm_qp_margin": (4, [0]),
        "comm_max_tokens_per_rank": (0, [4096]),
        "async_split_plan": (False, [True]),
        "validate_folding_routing": (False, [True]),
        "num_expert_groups": (None, [8]),
        "num_limited_groups": (None, [4]),
        "load_balance_coeff": (None, [None]),
        "expert_w1": (None, ["w1"]),
        "expert_w2": (None, ["w2"]),
        "expert_w3": (None, ["w3"]),
        "num_experts_attr": (None, ["num_local_experts"]),
        "top_k_attr": (None, ["num_experts_per_tok"]),
        "has_shared_experts": (None, [True]),
        "shared_experts_pattern": (None, ["shared"]),
        "shared_experts_gate_pattern": (None, ["shared_gate"]),
        "expert_activation": (None, ["silu"]),
    },
    "pipeline": {
        "schedule": ("1f1b", ["gpipe", "interleaved", "zero_bubble"]),
        "stages": ("auto", [2, "auto"]),
        "partition": ("best", ["uniform"]),
        "seed_layers": (False, [True]),
        "activation_checkpoint_interval": (0, [1]),
        "pipe_partitioned": (True, [False]),
        "grad_partitioned": (True, [False]),
        "use_reentrant": (True, [False]),
    },
    "compile": {
        "deepcompile": (False, [True]),
        "autoep_non_moe": (False, [True]),
        "free_activation": (False, [True]),
        "free_activation_threshold": (10_485_760, [0]),
        "offload_activation": (False, [True]),
        "offload_activation_pin_memory": (True, [False]),
        "offload_opt_states": (False, [True]),
        "offload_parameters": (False, [True]),
        "double_buffer": (True, [False]),
        "symmetric_memory": (False, [True]),
        "debug_log": (False, [True]),
        "sync_before_reduce": (False, [True]),
        "sync_after_reduce": (False, [True]),
        "sync_before_allgather": (False, [True]),
        "sync_after_allgather": (False, [True]),
        "keep_int_input_tensors": (True, [False]),
        "keep_all_input_tensors": (False, [True]),
        "passes": (None, [["z1"], ["z3", "autosp"], ["autotp"]]),
        "disable": (False, [False]),
        "backend": ("inductor", ["inductor"]),
    },
    "weight_quantization": {
        "enabled": (True, [False]),
        "num_bits": (8, [4]),
        "q_type": ("symmetric", ["asymmetric"]),
        "q_groups": (1, [8]),
        "quantized_initialization": (None, [{}, {"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": False}]),
        "post_init_quant": ({}, [{"fc": {"num_bits": 4}}]),
    },
    "hybrid_engine": {
        "enabled": (False, [True]),
        "max_out_tokens": (512, [1]),
        "inference_tp_size": (1, [2]),
        "release_inference_cache": (False, [True]),
        "pin_parameters": (True, [False]),
        "tp_gather_partition_size": (8, [1]),
        "enable_cuda_graph": (False, [True]),
    },
    "data_efficiency": {"enabled": (False, [True]), "seed": (1234, [0])},
    PARALLEL_SAMPLING: {
        "enabled": (False, [True]),
        "num_epochs": (1000, [1]),
        "num_workers": (0, [2]),
        "pin_memory": (False, [True]),
    },
    f"{PARALLEL_SAMPLING}.curriculum_learning": {
        "enabled": (False, [False]),
        "data_cluster_path": (None, ["p"]),
        "curriculum_metrics": (
            {},
            [
                {
                    "seqlen": {
                        "index_to_sample_path": "a",
                        "index_to_metric_path": "b",
                        "difficulty_type": "percentile",
                        "clustering_type": "schedule_based",
                        "min_difficulty": 1,
                        "max_difficulty": 8,
                        "schedule_type": "fixed_root",
                        "schedule_config": {"total_curriculum_step": 9, "difficulty_step": 1, "root_degree": 2},
                    }
                }
            ],
        ),
    },
    f"{PARALLEL_SAMPLING}.dynamic_batching": {
        "enabled": (False, [False]),
        "metrics_path": (None, ["p"]),
        "lr_scaling_method": ("linear", ["sqrt", "none"]),
        "min_batch_size": (1, [2]),
        "max_batch_size": (None, [64]),
        "sequence_picking_order": ("dataloader", ["random", "seqlen"]),
        "max_tokens": (None, [4096]),
        "verbose": (False, [True]),
    },
    "data_efficiency.data_routing": {"enabled": (False, [True])},
    "data_efficiency.data_routing.random_ltd": {
        "enabled": (False, [False]),
        "total_layer_num": (None, [24]),
        "random_ltd_layer_num": (None, [22]),
        "random_ltd_layer_id": (None, [[1, 2]]),
        "model_mask_name": (None, ["attention_mask"]),
        "model_type": (None, ["encoder", "decoder"]),
        "hidden_state_order": (None, ["batch_seq_dim", "seq_batch_dim"]),
        "random_ltd_schedule": (
            None,
            [{"min_value": 128, "max_value": 512, "schedule_config": {"require_steps": 100, "seq_per_step": 16}}],
        ),
        "global_batch_size": (None, [8]),
        "micro_batch_size": (None, [8]),
    },
    "data_efficiency.data_routing.random_ltd.layer_token_lr_schedule": {"enabled": (False, [False])},
    "curriculum_learning": {
        "enabled": (False, [False]),
        "curriculum_type": ("seqlen", ["seqlen"]),
        "min_difficulty": (None, [8]),
        "max_difficulty": (None, [1024]),
        "schedule_type": (None, ["custom"]),
    },
    f"{COMPRESSION}.weight_quantization.shared_parameters": {
        "enabled": (False, [False]),
        "quantizer_kernel": (False, [True]),
        "schedule_offset": (0, [5]),
        "quantize_groups": (1, [4]),
        "quantize_verbose": (False, [True]),
        "quantization_type": ("symmetric", ["asymmetric"]),
        "quantize_weight_in_forward": (False, [True]),
        "rounding": ("nearest", ["stochastic"]),
        "fp16_mixed_quantize": ({}, [{"enabled": True, "quantize_change_ratio": 0.01}]),
    },
    f"{COMPRESSION}.activation_quantization.shared_parameters": {
        "enabled": (False, [False]),
        "quantization_type": ("symmetric", ["asymmetric"]),
        "range_calibration": ("dynamic", ["static"]),
        "schedule_offset": (1000, [0]),
    },
    f"{COMPRESSION}.sparse_pruning.shared_parameters": {
        "enabled": (False, [False]),
        "method": ("l1", ["topk", "snip_momentum"]),
        "schedule_offset": (1000, [0]),
        "block_pattern": ("4x1", ["1x1"]),
        "dense_ratio": (0.1, [0.5]),
        "schedule_offset_stride": (1, [2]),
        "schedule_offset_end": (None, [1000]),
        "excluded_modules": ([], [["head"]]),
    },
    f"{COMPRESSION}.row_pruning.shared_parameters": {
        "enabled": (False, [False]),
        "method": ("l1", ["topk"]),
        "schedule_offset": (1000, [0]),
    },
    f"{COMPRESSION}.channel_pruning.shared_parameters": {"method": ("l1", ["topk"])},
    f"{COMPRESSION}.head_pruning.shared_parameters": {
        "enabled": (False, [False]),
        "method": ("topk", ["l1"]),
        "schedule_offset": (1000, [0]),
        "num_heads": (None, [12]),
    },
    f"{COMPRESSION}.weight_quantization": {
        "different_groups": ({}, [{"g": {"params": {"start_bits": 8, "target_bits": 4, "quantization_period": 2}}}])
    },
    f"{COMPRESSION}.activation_quantization": {"different_groups": ({}, [{"g": {"params": {"bits": 8}, "modules": ["a"]}}])},
    f"{COMPRESSION}.row_pruning": {
        "different_groups": ({}, [{"g": {"params": {"dense_ratio": 0.5}, "modules": "a", "related_modules": [["b"]]}}])
    },
    f"{COMPRESSION}.layer_reduction": {
        "enabled": (False, [True]),
        "keep_number_layer": (None, [5]),
        "module_name_prefix": (None, ["bert.encoder.layer"]),
        "teacher_layer": (None, [[1, 3, 5]]),
        "other_module_name": (None, [["bert.pooler"]]),
    },
    "quantize_training": {"enabled": (False, [True]), "eigenvalue": ({}, [{"enabled": True}])},
    "eigenvalue": {
        "enabled": (False, [True]),
        "verbose": (False, [True]),
        "max_iter": (100, [1]),
        "tol": (1e-2, [1e-3]),
        "stability": (1e-6, [0]),
        "gas_boundary_resolution": (1, [2]),
        "layer_name": ("bert.encoder.layer", ["x"]),
        "layer_num": (0, [12]),
    },
    "progressive_layer_drop": {"enabled": (False, [True]), "theta": (1.0, [0.5]), "gamma": (0.001, [0.01])},
    "sparse_attention": {
        "mode": ("fixed", ["dense", "variable", "bigbird", "bslongformer"]),
        "block": (16, [32]),
        "different_layout_per_head": (False, [True]),
        "num_local_blocks": (4, [8]),
        "num_global_blocks": (1, [2]),
        "attention": ("bidirectional", ["unidirectional"]),
        "horizontal_global_attention": (False, [True]),
        "num_different_global_patterns": (1, [4]),
    },
    "elasticity": {
        "enabled": (False, [False]),
        "max_train_batch_size": (None, [2000]),
        "micro_batch_sizes": (None, [[2, 4, 6]]),
        "min_gpus": (1, [2]),
        "max_gpus": (10_000, [100]),
        "min_time": (0.0, [20]),
        "num_gpus_per_node": (1, [8]),
        "model_parallel_size": (1, [2]),
        "prefer_larger_batch": (True, [False]),
        "ignore_non_elastic_batch_info": (False, [True]),
        "auto_resume": (None, [Path("runs")]),
        "version": (0.2, [0.1, "0.2"]),
    },
}

ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True, "amsgrad": False}
COMPRESSED = {**ADAM, "eps_inside_sqrt": False, "cuda_aware": False, "comm_backend_name": "nccl", "max_grad_norm": 0.0}
TRUST = {"max_coeff": 10.0, "min_coeff": 0.01}
PARAMS: dict[str, dict[str, Any]] = {
    "Adam": {**ADAM, "set_grad_none": True, "torch_adam": False, "adam_w_mode": True, "fp32_optimizer_states": True},
    "AdamW": {**ADAM, "adam_w_mode": True},
    "Adagrad": {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0, "fp32_optimizer_states": True},
    "Lamb": {**ADAM, "eps_inside_sqrt": False, "max_grad_norm": 0.0, **TRUST},
    "Lion": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0, "fp32_optimizer_states": True, "set_grad_none": True},
    "OneBitAdam": {**COMPRESSED, "freeze_step": 100_000},
    "ZeroOneAdam": {
        **COMPRESSED,
        "var_freeze_step": 100_000,
        "var_update_scaler": 16,
        "local_step_scaler": 32_678,
        "local_step_clipper": 16,
    },
    "OneBitLamb": {
        **COMPRESSED,
        **TRUST,
        "freeze_step": 100_000,
        "coeff_beta": 0.9,
        "factor_max": 4.0,
        "factor_min": 0.5,
        "factor_threshold": 0.1,
    },
    "Muon": {
        "lr": 0.02,
        "momentum": 0.95,
        "weight_decay": 0.0,
        "ns_method": "gram",
        "per_head_muon": False,
        "adam_w_mode": True,
        "torch_adam": False,
        "muon_lr": None,
        "adam_lr": None,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
        "last_batch_iteration": -1,
    },
    "OneCycle": {
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
        "last_batch_iteration": -1,
    },
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupDecayLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupCosineLR": {"warmup_min_ratio": 0.0, "warmup_num_steps": 1000, "cos_min_ratio": 1e-4, "warmup_type": "log"},
}

MODELS = {section.path: section.model for section in sections(DeepSpeedConfig)}


@pytest.mark.parametrize("key", TOP)
def test_a_top_level_key_has_its_default_and_takes_its_values(key: str) -> None:
    default, values = TOP[key]
    assert getattr(DeepSpeedConfig({"train_batch_size": 1}), key) == default
    for value in values:
        assert getattr(DeepSpeedConfig({"train_batch_size": 1, key: value}), key) == value


@pytest.mark.parametrize(("path", "key"), [(path, key) for path, keys in BLOCKS.items() for key in keys])
def test_a_key_of_a_block_has_its_default_and_takes_its_values(path: str, key: str) -> None:
    default, values = BLOCKS[path][key]
    model = MODELS[path]
    base = {"type": "Adam"} if path == "optimizer" else {}
    base |= {"num_gpus_per_node": 2, "version": 0.2} if path == "elasticity" else {}
    if key in model.model_fields:
        held = model.model_fields[key].get_default(call_default_factory=True)
        assert (held.model_dump(exclude_defaults=True) if hasattr(held, "model_dump") else held) == default
    for value in values:
        model.model_validate({**base, key: value})


@pytest.mark.parametrize("kind", PARAMS)
def test_the_parameters_of_a_type_have_their_defaults(kind: str) -> None:
    model = load_model((dict(KNOWN_OPTIMIZERS) | dict(KNOWN_SCHEDULES))[kind])
    found = {key: model.model_fields[key].default for key in PARAMS[kind]}
    assert found == PARAMS[kind]


def test_every_known_block_is_in_these_tables() -> None:
    listed = {path.partition(".")[0] for path in BLOCKS}
    assert set(blocks_of(DeepSpeedConfig)) - listed == {"scheduler", "timers", "compression_training"} - listed


def test_every_key_of_a_listed_block_is_in_these_tables() -> None:
    own = {"amp": {"opt_level"}}  # passed on, so there is no field
    nested = {"type", "params", "throughput", "parallel_write", "schedule_config", "tensor_parallel", "eigenvalue"}
    nested |= {"shared_parameters", "data_sampling", "data_routing", "curriculum_learning", "dynamic_batching", "random_ltd"}
    nested |= {"layer_token_lr_schedule", "leaf_module", "enabled", "tp_size", "classes", "offload"}
    for path, keys in BLOCKS.items():
        if path.startswith("compression_training.") or path == "sparse_attention":
            continue  # their sections share models, or keys depend on the mode
        assert set(MODELS[path].model_fields) - set(keys) <= nested, path
        assert set(keys) - set(MODELS[path].model_fields) <= own.get(path, set()), path


def test_defaults_are_the_same_with_and_without_validation() -> None:
    for path, model in MODELS.items():
        if path and not any(field.is_required() for field in model.model_fields.values()):
            assert model.model_construct() == model(), path
