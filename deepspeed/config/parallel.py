"""Blocks about model parallelism: `tensor_parallel`, `expert_parallel`, `pipeline`.

Lives here: keys and ranges. Does not live here: splitting layers (`tensor_parallel`, `moe`, `pipe`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from deepspeed.config.base import ConfigModel
from deepspeed.config.faults import Refusal
from deepspeed.config.values import Dtype, NonNegativeWhole, Number, PositiveWhole, TextList, Whole

__all__ = ["ExpertParallelConfig", "PipelineConfig", "TensorParallelConfig"]


class TensorParallelGroupConfig(ConfigModel):
    """`tensor_parallel.tensor_parallel` (also spelled `tp`): the degree and where its group comes from."""

    tp_size: PositiveWhole = 1
    """Ranks that share each layer; > 0."""

    tp_grain_size: PositiveWhole = 1
    """Layers are cut at multiples of this; > 0."""

    mpu: Any = None
    """Object with model-parallel groups; from Python only."""

    tp_group: Any = None
    """Process group; from Python only."""


class LayerSpecConfig(ConfigModel):
    """`tensor_parallel.partition_config.layer_specs[...]`: how layers whose names match are cut."""

    patterns: TextList
    """Regular expressions on parameter names."""

    partition_type: Literal["column", "row", "skip"]
    """Cut outputs, cut inputs, or leave whole."""

    shape: list[Any] | None = None
    """Shape to see the weight in; -1 fits, a nested list gives fused parts."""

    partition_dim: Whole | None = None
    """Dimension that is cut."""

    model_types: TextList | None = None
    """Model types that the rule is for. Left out: all."""

    gather_output: bool = False
    """Gather the output on every rank."""

    grad_allreduce: bool = False
    """All-reduce the gradient of a layer that is left whole."""

    def check(self) -> Iterable[Refusal]:
        """A shape is made of sizes."""
        if self.shape is not None and not all(_is_size(each) or _is_fused(each) for each in self.shape):
            cure = "Write for example [3, -1], or [[512, 128, 128], -1]."
            yield Refusal("shape", "needed numbers above 0, -1 for what is left, or lists of them", cure)


def _is_size(entry: object) -> bool:
    return isinstance(entry, int) and not isinstance(entry, bool) and (entry > 0 or entry == -1)


def _is_fused(entry: object) -> bool:
    return isinstance(entry, (list, tuple)) and bool(entry) and all(map(_is_size, entry)) and list(entry).count(-1) <= 1


class PartitionConfig(ConfigModel):
    """`tensor_parallel.partition_config`: own rules for cutting layers."""

    enabled: bool = True
    """Use these rules."""

    tp_size: PositiveWhole | None = None
    """Degree; left out: `autotp_size`."""

    use_default_specs: bool = True
    """Keep the built-in rules for layers that no rule here matches."""

    layer_specs: list[LayerSpecConfig] = Field(default_factory=list)
    """Rules in order; the first match counts."""

    embedding_partition_dim: Literal[0, 1] = 1
    """Dimension in which embeddings are cut: 0, rows of tokens; 1, columns."""

    lm_head_patterns: TextList = Field(default_factory=lambda: ["lm_head", "embed_out"])
    """Names of the output layer."""

    strict_mode: bool = False
    """Refuse a model with layers that no rule matches."""


class TensorParallelConfig(ConfigModel):
    """`tensor_parallel`: split the layers of a model over ranks (AutoTP)."""

    spellings: ClassVar[Mapping[str, str]] = {"tp": "tensor_parallel", "kernel_inject": "replace_with_kernel_inject"}

    autotp_size: NonNegativeWhole = 0
    """Ranks that share each layer in training; 0 and 1 split nothing."""

    dtype: Dtype = "fp16"
    """Format of the split model."""

    tp_overlap_comm: bool = False
    """Let the all-reduce of row-cut layers overlap with backward."""

    sequence_parallel: bool = False
    """Between attention and MLPs each rank holds a part of the tokens: norms and residuals are kept once, not on every rank.
    The number of tokens must be a multiple of `autotp_size`. Ours."""

    tensor_parallel: TensorParallelGroupConfig = Field(default_factory=TensorParallelGroupConfig)
    """The degree, in the form that inference uses, and the group."""

    partition_config: PartitionConfig | None = None
    """Own rules for cutting layers."""

    preset_model: Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"] | None = None
    """Built-in rules of one model family. Left out: found from the model."""

    injection_policy_tuple: Any = None
    """Layers to cut by hand; from Python only."""

    keep_module_on_host: bool = False
    """Keep weights on the host while they are split."""

    replace_with_kernel_inject: bool = False
    """Use fused kernels. Inference only."""

    vocab_parallel_lm_head: bool | None = None
    """Split the vocabulary of the output layer. Left out: follow the plan of the model."""

    vocab_parallel_ce_backend: Literal["torch", "liger"] = "torch"
    """Cross entropy over the split vocabulary."""

    def check(self) -> Iterable[Refusal]:
        """The degree may be said twice, but not two ways."""
        inner = self.tensor_parallel.tp_size
        if self.autotp_size > 0 and inner not in (1, self.autotp_size):
            yield Refusal("tensor_parallel.tp_size", f"needed autotp_size, {self.autotp_size}", "Leave one of the two out.")


_EXPERTS_OWN = {
    "its router's own": (
        *("route_norm", "route_scale", "routed_scaling_factor", "score_apply", "score_func", "top_k", "top_k_attr"),
        *("num_expert_groups", "num_limited_groups"),
    ),
    "its experts' own": ("expert_w3", "expert_activation"),
    "its blocks' own": ("has_shared_experts", "shared_experts_pattern", "shared_experts_gate_pattern"),
}
"""Keys that describe what AutoEP leaves as the model has it."""

_OF_DEEPEP = ("comm_num_sm", "comm_qp_margin", "comm_max_tokens_per_rank", "async_split_plan", "validate_folding_routing")


class ExpertParallelConfig(ConfigModel):
    """`expert_parallel`: experts of a model that knows nothing of ranks are spread over them (AutoEP).

    Modules of stacked experts, as transformers 5 builds them, are found by their structure. Routers, activations and shared
    experts stay the model's own: keys that would describe them are refused unless they are left at their defaults.
    """

    enabled: bool = False
    """Spread them."""

    autoep_size: PositiveWhole = 1
    """Ranks that share one set of experts; divides the number of experts and of data-parallel ranks."""

    expert_tensor_parallel_size: Literal[1] = 1
    """Ranks that share each expert; only 1."""

    preset_model: Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"] | None = None
    """Look only where this family has its blocks, experts and routers. Left out: at every module."""

    moe_layer_pattern: str | None = None
    """Look only at blocks in whose names this regular expression is found."""

    expert_pattern: str | None = None
    """Attribute of a block that holds its experts. Left out: any."""

    router_pattern: str | None = None
    """Attribute that a block must have to count as one."""

    use_grouped_mm: bool = True
    """Multiply all experts in torch's grouped product, where there is one: bf16 on a GPU."""

    disable_triton_grouped_mm: bool = False
    """Do not use a Triton form of it; there is none."""

    route_norm: bool | None = None
    """Only null: normalising weights is the router's own."""

    route_scale: Number = 1.0
    """Only 1: scaling weights is the router's own."""

    routed_scaling_factor: Number | Literal["auto"] = "auto"
    """Only "auto": as the model has it."""

    score_apply: Literal["auto", "pre", "post"] = "auto"
    """Only "auto": after the experts."""

    score_func: Literal["auto", "softmax", "sigmoid"] = "auto"
    """Only "auto": the router's own."""

    top_k: PositiveWhole | Literal["auto"] = "auto"
    """Only "auto": the router's own."""

    combine_impl: Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"] = "auto"
    """How outputs of a token's experts are added up; "auto" and "weighted_sum" are one."""

    row_weighting_impl: Literal["auto", "eager", "fused"] = "auto"
    """How weights are applied; "auto" and "eager" are one."""

    gate_up_impl: Literal["separate", "fused"] = "separate"
    """Whether the two first projections run as one; they do where the model stacks them as one."""

    comm_backend: Literal["comm", "deepep"] = "comm"
    """Transport of tokens; only `comm`."""

    comm_num_sm: PositiveWhole = 12
    """Multiprocessors for `deepep`."""

    comm_qp_margin: NonNegativeWhole = 4
    """Spare queue pairs for `deepep`."""

    comm_max_tokens_per_rank: NonNegativeWhole = 0
    """Tokens per rank for `deepep`."""

    async_split_plan: bool = False
    """Plan the exchange beside the computation; only false."""

    validate_folding_routing: bool = False
    """Check the routing at each step; only false."""

    num_expert_groups: PositiveWhole | None = None
    """Only null: groups of experts are the router's own."""

    num_limited_groups: PositiveWhole | None = None
    """Only null: the router's own."""

    load_balance_coeff: None = None
    """Not available; only null is accepted."""

    expert_w1: str | None = None
    """Attribute of the experts: stacked weights that take tokens. Left out: `gate_up_proj` or `up_proj`."""

    expert_w2: str | None = None
    """Attribute of the experts: stacked weights that give them back. Left out: `down_proj`."""

    expert_w3: str | None = None
    """Only null: gate and value lie side by side in the first weights."""

    num_experts_attr: str | None = None
    """Attribute of the model's config that every layer's number of experts must equal. Left out: not compared."""

    top_k_attr: str | None = None
    """Only null: the router's own."""

    has_shared_experts: bool | None = None
    """Only null: shared experts stay as they are."""

    shared_experts_pattern: str | None = None
    """Only null."""

    shared_experts_gate_pattern: str | None = None
    """Only null."""

    expert_activation: str | None = None
    """Only null: the model's own."""

    def check(self) -> Iterable[Refusal]:
        """What would be without effect is refused."""
        if not self.enabled:
            return
        for whose, keys in _EXPERTS_OWN.items():
            needed = f"needed the default: with AutoEP it is {whose}"
            yield from (Refusal(k, needed, "Leave it out; set up the model itself.") for k in keys if self._is_changed(k))
        if self.comm_backend == "deepep":
            yield Refusal("comm_backend", 'needed "comm": "deepep" is not built yet', "Leave it out.")
        for key in _OF_DEEPEP:
            if self._is_changed(key):
                yield Refusal(key, "needed the default: not built yet, with deepep", "Leave it out.")
        if self.combine_impl not in ("auto", "weighted_sum"):
            yield Refusal("combine_impl", 'needed "auto" or "weighted_sum", the one way there is', 'Write "auto".')
        if self.row_weighting_impl == "fused":
            yield Refusal("row_weighting_impl", 'needed "auto" or "eager": "fused" is not built yet', 'Write "auto".')
        yield from self._refused_pattern()

    def _refused_pattern(self) -> Iterable[Refusal]:
        try:
            re.compile(self.moe_layer_pattern or "")
        except re.error as error:
            cure = r'Write for example "layers\\.\\d+\\.mlp$".'
            yield Refusal("moe_layer_pattern", f"needed a regular expression ({error})", cure)

    def _is_changed(self, key: str) -> bool:
        return bool(getattr(self, key) != type(self).model_fields[key].default)


class PipelineConfig(ConfigModel):
    """`pipeline`: settings of a model that is a `PipelineModule`."""

    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = "1f1b"
    """Order in which a stage computes; the numbers are the same. `1f1b`: one forward per backward, which keeps at most as
    many activations as there are stages from this one on. `gpipe`: all forwards first. `interleaved`: 1F1B over the
    `PipelineModule(num_chunks=...)` parts of a stage; less idle time, more activations and messages. `zero_bubble`:
    gradients of weights are put off into idle time. `deepspeed-pipeline draw` shows them."""

    stages: PositiveWhole | Literal["auto"] = "auto"
    """Accepted and not read: `PipelineModule` says it."""

    partition: str = "best"
    """Accepted and not read: `PipelineModule` says it."""

    seed_layers: bool = False
    """Accepted and not read: `PipelineModule` says it."""

    activation_checkpoint_interval: NonNegativeWhole = 0
    """Layers per checkpointed part; 0 leaves it to `PipelineModule`."""

    pipe_partitioned: bool = True
    """Send activations in parts when there are model-parallel ranks."""

    grad_partitioned: bool = True
    """Send gradients in parts when there are model-parallel ranks."""

    use_reentrant: bool = True
    """Form of activation checkpointing, as torch names it. Recomputation is always the non-reentrant one."""
