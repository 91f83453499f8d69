"""Blocks about model parallelism: `tensor_parallel`, `expert_parallel`, `pipeline`.

Lives here: keys and ranges. Does not live here: splitting layers (`tensor_parallel`, `moe`, `pipe`).
"""

from __future__ import annotations

from collections.abc import Iterable
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

    embedding_partition_dim: Whole = 1
    """Dimension in which embeddings are cut."""

    lm_head_patterns: TextList = Field(default_factory=lambda: ["lm_head", "embed_out"])
    """Names of the output layer."""

    strict_mode: bool = False
    """Refuse a model with layers that no rule matches."""


class TensorParallelConfig(ConfigModel):
    """`tensor_parallel`: split the layers of a model over ranks (AutoTP)."""

    spellings: ClassVar = {"tp": "tensor_parallel", "kernel_inject": "replace_with_kernel_inject"}

    autotp_size: NonNegativeWhole = 0
    """Ranks that share each layer in training; 0 and 1 split nothing."""

    dtype: Dtype = "fp16"
    """Format of the split model."""

    tp_overlap_comm: bool = False
    """Let the all-reduce of row-cut layers overlap with backward."""

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


class ExpertParallelConfig(ConfigModel):
    """`expert_parallel`: replace mixture-of-experts blocks by layers whose experts are spread over ranks (AutoEP)."""

    enabled: bool = False
    """Replace them."""

    autoep_size: PositiveWhole = 1
    """Ranks that share one set of experts; divides the number of experts."""

    expert_tensor_parallel_size: Literal[1] = 1
    """Ranks that share each expert; only 1."""

    preset_model: Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"] | None = None
    """Built-in description of one model family. Left out: found from the model."""

    moe_layer_pattern: str | None = None
    """Regular expression on names of the blocks."""

    expert_pattern: str | None = None
    """Attribute of a block that holds its experts."""

    router_pattern: str | None = None
    """Attribute of a block that holds its router."""

    use_grouped_mm: bool = True
    """Multiply all experts in one grouped operation."""

    disable_triton_grouped_mm: bool = False
    """Do not use the Triton form of it."""

    route_norm: bool | None = None
    """Normalise the chosen weights. Left out: as the model does."""

    route_scale: Number = 1.0
    """Factor on the chosen weights."""

    routed_scaling_factor: Number | Literal["auto"] = "auto"
    """Factor on the routed output; "auto": as the model has it."""

    score_apply: Literal["auto", "pre", "post"] = "auto"
    """Apply weights before or after the experts."""

    score_func: Literal["auto", "softmax", "sigmoid"] = "auto"
    """From router logits to weights."""

    top_k: PositiveWhole | Literal["auto"] = "auto"
    """Experts per token."""

    combine_impl: Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"] = "auto"
    """How outputs of a token's experts are added up."""

    row_weighting_impl: Literal["auto", "eager", "fused"] = "auto"
    """How weights are applied; `fused` with `deepep` only."""

    gate_up_impl: Literal["separate", "fused"] = "separate"
    """Whether the two first projections run as one."""

    comm_backend: Literal["comm", "deepep"] = "comm"
    """Transport of tokens."""

    comm_num_sm: PositiveWhole = 12
    """Multiprocessors for `deepep`."""

    comm_qp_margin: NonNegativeWhole = 4
    """Spare queue pairs for `deepep`."""

    comm_max_tokens_per_rank: NonNegativeWhole = 0
    """Tokens per rank for `deepep`, which needs it above 0."""

    async_split_plan: bool = False
    """Plan the exchange beside the computation."""

    validate_folding_routing: bool = False
    """Check the routing at each step: slow, for finding bugs."""

    num_expert_groups: PositiveWhole | None = None
    """Groups of experts for limited routing."""

    num_limited_groups: PositiveWhole | None = None
    """Groups that a token may choose from."""

    load_balance_coeff: None = None
    """Not available; only null is accepted."""

    expert_w1: str | None = None
    """Attribute of an expert: first weight."""

    expert_w2: str | None = None
    """Attribute of an expert: last weight."""

    expert_w3: str | None = None
    """Attribute of an expert: gate weight; null: fused with the first, or as the preset has it."""

    num_experts_attr: str | None = None
    """Attribute of the model's config: number of experts."""

    top_k_attr: str | None = None
    """Attribute of the model's config: experts per token."""

    has_shared_experts: bool | None = None
    """Whether blocks have experts that every token uses."""

    shared_experts_pattern: str | None = None
    """Attribute of a block that holds those."""

    shared_experts_gate_pattern: str | None = None
    """Attribute of a block that holds their gate."""

    expert_activation: str | None = None
    """Activation of the experts; null: as the preset has it."""

    def check(self) -> Iterable[Refusal]:
        """`deepep` needs a budget, and alone has the fused weighting."""
        if self.comm_backend == "deepep" and self.comm_max_tokens_per_rank == 0:
            yield Refusal("comm_max_tokens_per_rank", "needed a number > 0 with comm_backend deepep", "Give one.")
        if self.row_weighting_impl == "fused" and self.comm_backend != "deepep":
            yield Refusal("row_weighting_impl", "needed comm_backend deepep with fused", 'Write "auto".')


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
