"""The one list of what a configuration may ask for and this version does not have yet.

Such keys are typed and checked like all others; using one is an error that says so, never ignored. Building a feature means
deleting its line here. Lives here: the list. Does not live here: anything else. Called by `config.root` and, for the status
column, by `config.reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from deepspeed.config.faults import Fault, FaultKind

__all__ = ["NOTES", "UNBUILT", "Unbuilt", "status_of", "unbuilt_faults"]


class Given(Protocol):
    """The part of a configuration that this module asks; blocks are its attributes."""

    def is_given(self, name: str) -> bool:
        """Whether the user wrote this block or top-level key."""


def _is_true(value: Any) -> bool:
    return bool(value)


def _is_there(value: Any) -> bool:
    return value is not None


def _above(limit: float) -> Callable[[Any], bool]:
    return lambda value: value is not None and value > limit


class Unbuilt(NamedTuple):
    """One feature."""

    key: str
    """Dotted path of the key that asks for it; the path of a block stands for all its keys."""
    instead: str
    """What to do: a sentence."""
    is_used: Callable[[Any], bool] = _is_true
    """Whether this value asks for it."""
    only_with: str = ""
    """A second key that must be on, or above 0, for the first to have a meaning."""
    status: str = "not built yet"
    """Entry in the status column of the reference."""

    @property
    def covers(self) -> str:
        """The path of all keys that belong to the feature: the whole block when `key` is its switch."""
        return self.key.removesuffix(".enabled")


_OFF = "Leave it out."
_OPTIMIZERS = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb", "MuAdam", "MuAdamW", "MuSGD", "Muon")
_STAGE = "zero_optimization.stage"

UNBUILT: tuple[Unbuilt, ...] = (
    Unbuilt("zero_optimization.zero_hpz_partition_size", _OFF, _above(1), _STAGE),
    Unbuilt("zero_optimization.zero_quantized_weights", _OFF, only_with=_STAGE),
    Unbuilt("zero_optimization.zero_quantized_nontrainable_weights", _OFF, only_with=_STAGE),
    Unbuilt("zero_optimization.zero_quantized_gradients", _OFF, only_with=_STAGE),
    Unbuilt("zero_optimization.zeropp_loco_param", _OFF, _is_there, _STAGE),
    Unbuilt("zero_optimization.mics_shard_size", _OFF, _above(0), _STAGE),
    Unbuilt("zero_optimization.mics_hierarchical_params_gather", _OFF, only_with=_STAGE),
    Unbuilt(
        "optimizer.type",
        "Use Adam, AdamW, Adagrad, Lion, Lamb, or a class of torch.optim such as SGD.",
        lambda kind: kind in _OPTIMIZERS,
        status=f"works, but {', '.join(_OPTIMIZERS)} are not built yet",
    ),
    Unbuilt("aio.use_gds", "Leave it out: tensors on a GPU are moved through page-locked host memory."),
    Unbuilt("amp.enabled", "Use a bf16, fp16 or torch_autocast block."),
    Unbuilt("graph_harvesting", _OFF),
    Unbuilt("autotuning.enabled", _OFF),
    Unbuilt("compile.deepcompile", "Leave it out; engine.compile() and torch.compile do without."),
    Unbuilt("compile.passes", _OFF),
    Unbuilt("hybrid_engine.enabled", _OFF),
    Unbuilt("sparse_attention", _OFF, _is_there),
    Unbuilt("progressive_layer_drop.enabled", _OFF),
    Unbuilt("eigenvalue.enabled", _OFF),
    Unbuilt("data_efficiency.enabled", _OFF),
    Unbuilt("curriculum_learning.enabled", _OFF),
    Unbuilt("compression_training", _OFF, lambda block: block.is_enabled),
    Unbuilt("quantize_training.enabled", _OFF),
    Unbuilt("weight_quantization", _OFF, lambda block: block is not None and block.enabled),
)


_LEFT_TO_THE_MODEL = (
    *("route_norm", "route_scale", "routed_scaling_factor", "score_apply", "score_func", "top_k", "top_k_attr"),
    *("num_expert_groups", "num_limited_groups", "expert_w3", "expert_activation", "has_shared_experts"),
    *("shared_experts_pattern", "shared_experts_gate_pattern", "comm_backend", "comm_num_sm", "comm_qp_margin"),
    *("comm_max_tokens_per_rank", "async_split_plan", "validate_folding_routing"),
)

_LATER = "accepted; not built yet"
_IDLE = "accepted, no effect"
_ALWAYS = "accepted, no effect: what it asks for is always so"

NOTES: dict[str, str] = {
    "zero_optimization.offload_optimizer.ratio": "works on the CPU; on accelerators only 1",
    "zero_optimization.contiguous_gradients": _ALWAYS,
    "zero_optimization.round_robin_gradients": _ALWAYS,
    "zero_optimization.parameter_alignment": _ALWAYS,
    "zero_optimization.pipeline_loading_checkpoint": _IDLE,
    "zero_optimization.allgather_partitions": _IDLE,
    "zero_optimization.elastic_checkpoint": _IDLE,
    "zero_optimization.offload_optimizer.fast_init": _ALWAYS,
    "zero_optimization.legacy_stage1": "only false",
    "disable_allgather": _IDLE,
    "allgather_size": _IDLE,
    "optimizer.legacy_fusion": _IDLE,
    **{f"optimizer.params ({kind})": "not built yet" for kind in _OPTIMIZERS},
    "bf16.immediate_grad_update": _IDLE,
    "checkpoint.load_universal": _IDLE,
    "checkpoint.parallel_write.pipeline_stage": _ALWAYS,
    **{f"pipeline.{key}": _IDLE for key in ("stages", "partition", "seed_layers", "use_reentrant")},
    "pipeline.pipe_partitioned": _LATER,
    "pipeline.grad_partitioned": _LATER,
    "checkpoint.checkpoint_serialization": _IDLE,
    **{f"expert_parallel.{key}": "accepted at its default" for key in _LEFT_TO_THE_MODEL},
    "expert_parallel.disable_triton_grouped_mm": _ALWAYS,
    "expert_parallel.gate_up_impl": 'what the model stacks always runs as one; "fused" is refused where nothing is stacked',
    "compile": _LATER,
    "compile.disable": _IDLE,
    "compile.backend": _IDLE,
    "tensor_parallel.dtype": "accepted, no effect: the precision blocks say it",
    "tensor_parallel.keep_module_on_host": _ALWAYS,
    "tensor_parallel.replace_with_kernel_inject": "only false in training",
}
"""Key or block -> its status, where it is neither "works" nor an error: what is harmless to accept, and why."""


def unbuilt_faults(config: Given) -> list[Fault]:
    """List the features of `UNBUILT` that a configuration asks for."""
    faults = []
    for entry in UNBUILT:
        if not config.is_given(entry.key.partition(".")[0]):
            continue
        value = _value_at(config, entry.key)
        if entry.is_used(value) and (not entry.only_with or _value_at(config, entry.only_with)):
            shown = value if isinstance(value, (bool, int, float, str)) else "{...}"
            faults.append(Fault(entry.key, shown, "not built yet in this version", entry.instead, FaultKind.UNBUILT))
    return faults


def status_of(path: str) -> str:
    """Say in a few words whether a key works: the entry of its own, or of the smallest block around it that has one."""
    known = NOTES | {entry.covers: entry.status for entry in UNBUILT} | {entry.key: entry.status for entry in UNBUILT}
    around = [key for key in known if path == key or path.startswith(f"{key}.")]
    return known[max(around, key=len)] if around else "works"


def _value_at(config: object, path: str) -> Any:
    """Follow a dotted path; None where a block on the way is None."""
    value: Any = config
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value
