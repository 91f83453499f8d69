"""The block `zero_optimization` and the blocks inside it.

Lives here: keys, ranges, old spellings, and what keys of these blocks forbid each other. Does not live here: which of them
this version can do (`config.unbuilt`), sharding itself (`zero`, `offload`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from deepspeed.common.logging import warn_once
from deepspeed.config.base import ConfigModel
from deepspeed.config.faults import NVME_NEEDS_A_PLACE, Refusal
from deepspeed.config.values import (
    FilePath,
    Fraction,
    NonNegativeWhole,
    PositiveWhole,
    RoundedDown,
    TextList,
    Whole,
    ZeroStage,
)

__all__ = ["LeafModuleConfig", "LocoConfig", "OffloadOptimizerConfig", "OffloadParamConfig", "ZenFlowConfig", "ZeroConfig"]


class OffloadParamConfig(ConfigModel):
    """`zero_optimization.offload_param`: where parameters rest while they are not in use (stage 3)."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """Where each rank's shards rest: on the device, in host memory (on a CPU that is the same), or in files. Below stage 3
    parameters are whole and stay where they are."""

    nvme_path: FilePath = None
    """Directory on the NVMe device; required when `device` is `nvme`. Each process has a folder of its own there, removed
    at its end, or after a kill by the next start."""

    buffer_count: NonNegativeWhole = 5
    """Buffers that shards are read from NVMe into: so many reads are ahead of the computation, at most."""

    buffer_size: NonNegativeWhole = 100_000_000
    """Elements of a buffer, at most; it is made no larger than needed. One rank's shard of a unit of the model must fit."""

    max_in_cpu: NonNegativeWhole = 1_000_000_000
    """Elements of each rank's shards kept in host memory when `device` is `nvme`: those of the units used first. 0 puts
    all into the file."""

    pin_memory: bool = False
    """Use page-locked host memory: faster copies, memory the system cannot take back."""

    def check(self) -> Iterable[Refusal]:
        """NVMe needs a place."""
        if self.device == "nvme" and self.nvme_path is None:
            yield NVME_NEEDS_A_PLACE


class OffloadOptimizerConfig(ConfigModel):
    """`zero_optimization.offload_optimizer`: where optimizer state rests between steps (stages 1-3)."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """Tier that holds masters, optimizer state and gradients (gradients: host memory for `nvme` too). The step itself runs
    on the CPU for both `cpu` and `nvme`. Where the device is the CPU, `cpu` moves nothing."""

    nvme_path: FilePath = None
    """Directory on the NVMe device; required when `device` is `nvme`. Each rank makes a folder of its own there, reserves
    all space at the start, and removes it at the end; what a killed process left is removed by the next start."""

    buffer_count: NonNegativeWhole = 4
    """With `nvme`, buffers of `sub_group_size` elements that may be in memory: at least one per tensor that the optimizer
    keeps, masters among them (Adam: 3). Sub-groups are made small enough for reading, stepping and writing to share them; at
    most three quarters of the state are kept in memory."""

    pin_memory: bool = False
    """Use page-locked host memory: faster copies, memory the system cannot take back."""

    pipeline_read: bool = False
    """Read the next sub-groups from NVMe while this one steps."""

    pipeline_write: bool = False
    """Write the last sub-group to NVMe while the next one steps, and the last ones while training goes on."""

    fast_init: bool = False
    """Write initial NVMe state straight from the parameters. It always is, without a copy in memory."""

    ratio: Fraction = 1.0
    """Part of each rank's elements, 0..1, that a thread steps in host memory while the caller steps the rest; below 1 at
    stage 3 only, with Adam or AdamW."""

    super_offload: bool = False
    """Step in a thread; a group of parameters is published and gathered as soon as it is stepped, while the next one is."""

    cpuadam_cores_perc: Fraction = 0.8
    """Part of torch's CPU threads, 0..1, that the thread of `super_offload` uses."""

    @property
    def pipeline(self) -> bool:
        """Whether reads or writes overlap with the step."""
        return self.pipeline_read or self.pipeline_write

    def check(self) -> Iterable[Refusal]:
        """NVMe needs a place."""
        if self.device == "nvme" and self.nvme_path is None:
            yield NVME_NEEDS_A_PLACE
        for key, is_on in (("ratio", self.ratio < 1.0), ("super_offload", self.super_offload)):
            if self.device == "nvme" and is_on:
                yield Refusal(key, 'needed device "cpu": it steps what is in memory', 'Leave it out, or use device "cpu".')


class ZenFlowConfig(ConfigModel):
    """`zero_optimization.zenflow`: update the most important gradient columns at once, the rest later on the CPU."""

    topk_ratio: Annotated[Fraction, Field(gt=0, lt=1)] = 0.1
    """Part of each matrix' columns (input channels) that is updated with every step; > 0 and < 1."""

    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    """When the important columns are chosen anew: at the end of a window of updates. "auto": every epoch, or every 100
    updates where the engine has no data loader."""

    select_interval: PositiveWhole | Literal["auto"] = "auto"
    """Updates ("step") or epochs ("epoch") between two choices; a number only with a strategy other than "auto"."""

    update_interval: PositiveWhole | Literal["auto"] = "auto"
    """Updates of the engine in a window, at whose end the other columns are updated with the mean of their gradients.
    "auto": a window ends when these weigh as much as those of the important columns, and after 32 updates."""

    overlap_step: bool = False
    """Update the other columns in a thread, behind the next window; the result is merged at its end."""

    offload: bool = False
    """Keep the moments of the important columns in host memory even where there is a device."""

    auto_ratio: Fraction = 0.99
    """With `update_interval` "auto", 0..1: how much of an important element's root mean square the summed gradient of
    another must have."""

    full_warm_up_rounds: NonNegativeWhole = 0
    """Steps at the start that update everything."""

    pt_reserved_cores_perc: Fraction = 0.5
    """Part of torch's CPU threads, 0..1, that the thread of `overlap_step` leaves alone."""

    steps_per_epoch: PositiveWhole | None = None
    """Updates in an epoch. Left out: as `training_data` given to `initialize` has them."""

    def check(self) -> Iterable[Refusal]:
        """The interval of choices follows its strategy, and is no shorter than the interval of updates."""
        is_auto = self.select_interval == "auto"
        if self.select_strategy == "auto" and not is_auto:
            yield Refusal(
                "select_interval", 'needed "auto", as select_strategy is', 'Set select_strategy to "step" or "epoch".'
            )
        elif self.select_strategy != "auto" and is_auto:
            yield Refusal("select_interval", f'needed a number with select_strategy "{self.select_strategy}"', "Write one.")
        elif self.select_strategy == "step" and _is_below(self.select_interval, self.update_interval):
            needed = f"needed at least update_interval, {self.update_interval}"
            yield Refusal("select_interval", needed, "Raise it, or lower update_interval.")


class LeafModuleConfig(ConfigModel):
    """`zero_optimization.leaf_module`: modules that stage 3 gathers as one unit, without hooks inside."""

    classes: TextList = Field(
        default_factory=lambda: [
            "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
            "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
            "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        ]
    )
    """Full names of classes; a single text is a list of one. Default: the sparse MoE blocks of Mixtral, Qwen2 and Qwen3."""

    names: TextList = Field(default_factory=list)
    """Exact names of modules."""

    name_suffixes: TextList = Field(default_factory=list)
    """Endings of module names."""


class LocoConfig(ConfigModel):
    """`zero_optimization.zeropp_loco_param`: error feedback for quantized gradients (LoCo, arXiv:2407.04480)."""

    err_beta: Fraction = 0.8
    """Weight of the remembered error, 0..1."""

    reset_T: PositiveWhole = 1024
    """Steps after which the remembered error is dropped."""


class ZeroConfig(ConfigModel):
    """`zero_optimization`: which of optimizer state, gradients and parameters are sharded over ranks, and how."""

    spellings: ClassVar[Mapping[str, str]] = {
        **{
            f"stage3_{key}": key
            for key in (
                "prefetch_bucket_size",
                "param_persistence_threshold",
                "model_persistence_threshold",
                "max_live_parameters",
                "max_reuse_distance",
                "gather_16bit_weights_on_model_save",
                "module_granularity_threshold",
                "use_all_reduce_for_fetch_params",
                "allgather_sequential",
            )
        },
        "stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save",
    }
    deprecated: ClassVar[Mapping[str, str]] = {
        "stage3_gather_fp16_weights_on_model_save": "write stage3_gather_16bit_weights_on_model_save",
        "cpu_offload": 'write offload_optimizer {"device": "cpu"}',
        "cpu_offload_param": 'write offload_param {"device": "cpu"}',
        "cpu_offload_use_pin_memory": "write pin_memory inside offload_optimizer or offload_param",
        "elastic_checkpoint": "every checkpoint loads on any number of ranks; leave it out",
    }

    stage: ZeroStage = 0
    """0: nothing is sharded; 1: optimizer state; 2: and gradients; 3: and parameters."""

    contiguous_gradients: bool = True
    """Copy gradients into one buffer as they appear. This engine's always lie in one buffer per bucket, at every stage."""

    reduce_scatter: bool = True
    """Reduce-scatter gradients: each rank gets its share of the mean. false: all-reduce them, and keep the share: twice the
    bytes. Stages 1-3."""

    reduce_bucket_size: PositiveWhole = 500_000_000
    """Most elements of a gradient bucket; > 0. A bucket is never more than a sixteenth of the model (or 2**20 elements), so
    that reduction overlaps with backward; a larger parameter is a bucket of its own. At stage 3 also the most elements of
    a block that is gathered as one unit."""

    use_multi_rank_bucket_allreduce: bool = True
    """With `reduce_scatter` false: all ranks' shares of a bucket in one all-reduce. false: one all-reduce for each rank's.
    Stages 1-3."""

    allgather_partitions: bool = True
    """Gather updated parameters with an all-gather rather than broadcasts. Accepted; the fastest way is always taken."""

    allgather_bucket_size: PositiveWhole = 500_000_000
    """Elements gathered at a time after the step; > 0. Stages 1 and 2, where the same buckets serve reduction and gathering:
    the smaller of this and `reduce_bucket_size` counts."""

    overlap_comm: bool | None = None
    """Reduce gradients while backward runs. Left out: true. false at stages 2 and 3: each bucket is waited for at once,
    since its memory is needed again; at stages 0 and 1 all are reduced when backward is over."""

    compute_grad_norm: bool = True
    """Compute the gradient norm even when clipping is off; false at stages 1 and 2 only."""

    load_from_fp32_weights: bool = True
    """On load, take the master copy from the checkpoint's fp32 values instead of the 16-bit ones."""

    elastic_checkpoint: bool = False
    """Deprecated, no effect: every checkpoint loads on any number of ranks."""

    offload_param: OffloadParamConfig | None = None
    """Where parameters rest. Stage 3."""

    offload_optimizer: OffloadOptimizerConfig | None = None
    """Where optimizer state rests. Stages 1-3."""

    zenflow: ZenFlowConfig | None = None
    """Update important gradients at once and the rest later."""

    sub_group_size: PositiveWhole = 1_000_000_000
    """Most elements that one pass of the optimizer step covers; fewer where that suits the cache. 0 means the default
    (shipped client files hold it)."""

    prefetch_bucket_size: RoundedDown = 50_000_000
    """Elements gathered ahead of their use; 0 turns it off. Stage 3. A fraction is rounded down: clients write 0.9 times a
    product."""

    param_persistence_threshold: NonNegativeWhole = 100_000
    """Parameters of at most this many elements stay gathered. Stage 3."""

    model_persistence_threshold: NonNegativeWhole = sys.maxsize
    """Upper limit of the elements that stay gathered for that reason. Stage 3."""

    max_live_parameters: NonNegativeWhole = 1_000_000_000
    """Gathered elements above which parameters are released, and nothing is gathered ahead. Stage 3."""

    max_reuse_distance: NonNegativeWhole = 1_000_000_000
    """Keep a unit gathered when it is used again within this many elements of other units. With the default a model of less
    than 1e9 parameters stays gathered from forward to backward; 0 gathers it again in backward. Stage 3."""

    gather_16bit_weights_on_model_save: bool = False
    """Let `save_16bit_model` gather the whole model on rank 0. Stage 3."""

    module_granularity_threshold: Whole = 0
    """Gather a module as one unit when its elements per sub-module are below this. Stage 3."""

    use_all_reduce_for_fetch_params: bool = False
    """Gather by an all-reduce over zero-filled buffers. Stage 3."""

    allgather_sequential: bool = False
    """Gather parameters one by one: lower peak memory. Stage 3."""

    ignore_unused_parameters: bool = True
    """Accept parameters without a gradient; false makes them an error. Stages 1 and 2."""

    legacy_stage1: bool = False
    """Removed: the old form of stage 1. Only false is accepted."""

    round_robin_gradients: bool = False
    """Deal parameters to shards in turn, so that ranks copy gradients to the host evenly. Here every bucket is cut into
    equal shards, which is even already. Stages 1 and 2."""

    parameter_alignment: bool = False
    """Start each parameter on a 16-byte border of the flat buffer. Here each starts on a 64-byte border. Stages 1 and 2."""

    zero_hpz_partition_size: PositiveWhole = 1
    """Ranks that hold a second copy of the parameter shards, usually those of one node; 1 is off. Stage 3
    (ZeRO++, arXiv:2306.10209)."""

    zero_quantized_weights: bool = False
    """Gather parameters as 8-bit blocks. Stage 3 (ZeRO++)."""

    zero_quantized_nontrainable_weights: bool = False
    """Store frozen parameters as 8-bit blocks. Stage 3."""

    zero_quantized_gradients: bool = False
    """Reduce gradients as 4-bit blocks. Stage 3 (ZeRO++)."""

    zeropp_loco_param: LocoConfig | None = None
    """Error feedback for `zero_quantized_gradients`."""

    mics_shard_size: Whole = -1
    """Shard over groups of this many ranks and replicate between groups; -1 is off. Stage 3 (MiCS, arXiv:2205.00119)."""

    mics_hierarchical_params_gather: bool = False
    """With MiCS, gather between nodes first, then inside the node."""

    memory_efficient_linear: bool = True
    """Let backward gather weights again instead of keeping those that forward has used: while forward runs, autograd saves
    the place of a gathered weight rather than its memory. Stage 3."""

    pipeline_loading_checkpoint: bool = False
    """Ranks load checkpoints one after another, to bound host memory. Here a rank reads its own bytes alone. Stage 3."""

    override_module_apply: bool = True
    """`zero.Init` gathers parameters inside `Module.apply`. Stage 3."""

    log_trace_cache_warnings: bool = False
    """Log when the recorded order of modules no longer holds. Stage 3."""

    enable_sanity_checks: bool = False
    """Check internal invariants at each step: slow, for finding bugs."""

    save_muon_momentum_buffer_in_memory: bool = False
    """Keep Muon's momentum out of NVMe. Stage 3."""

    leaf_module: LeafModuleConfig = Field(default_factory=LeafModuleConfig)
    """Modules that are gathered as one unit. Stage 3."""

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer state is to rest somewhere else than on the device."""
        return self.stage >= 1 and self.offload_optimizer is not None and self.offload_optimizer.device != "none"

    @classmethod
    def adapt(cls, given: dict[str, object]) -> Iterable[Refusal]:
        """Move the keys of before `offload_optimizer` and `offload_param`; read `sub_group_size` 0."""
        faults = [
            *_move_offload(given, "cpu_offload", "offload_optimizer"),
            *_move_offload(given, "cpu_offload_param", "offload_param"),
        ]
        pin = given.pop("cpu_offload_use_pin_memory", None)
        for block in ("offload_optimizer", "offload_param"):
            tier = given.get(block)
            if pin is not None and isinstance(tier, dict):
                given[block] = {"pin_memory": pin, **tier}
        if given.get("sub_group_size") == 0 and given.get("sub_group_size") is not False:
            del given["sub_group_size"]
            warn_once("sub_group_size=0", "zero_optimization.sub_group_size = 0: using the default, 1e9; leave it out")
        return faults

    def check(self) -> Iterable[Refusal]:
        """What depends on the stage inside this block."""
        self._warn_of_idle_offload()
        if self.legacy_stage1:
            yield Refusal("legacy_stage1", "needed false: the old form of stage 1 is gone", "Leave it out and use stage 1.")
        if not self.compute_grad_norm and self.stage not in (1, 2):
            yield Refusal("compute_grad_norm", f"needed true at stage {self.stage}", "Leave it out, or use stage 1 or 2.")
        offload = self.offload_optimizer
        if offload is not None and offload.device != "none" and offload.ratio < 1.0 and self.stage != 3:
            yield Refusal("offload_optimizer.ratio", f"needed 1.0 at stage {self.stage}", "Leave it out, or use stage 3.")
        yield from self._check_zenflow()
        if self.mics_shard_size < 1 and self.mics_shard_size != -1:
            yield Refusal("mics_shard_size", "needed a number of ranks >= 1, or -1 for off", "Leave it out.")

    def _check_zenflow(self) -> Iterable[Refusal]:
        """ZenFlow is a schedule over an optimizer that rests in host memory, whole, and judges gradients by their norm."""
        if self.zenflow is None:
            return
        if self.stage == 0:
            warn_once("zenflow", "zero_optimization.zenflow has no effect at stage 0: use stage 1, 2 or 3")
            return
        offload = self.offload_optimizer
        if offload is None or offload.device != "cpu":
            cure = 'Write offload_optimizer {"device": "cpu"}, or leave zenflow out.'
            yield Refusal("zenflow", 'needed offload_optimizer.device "cpu" beside it', cure)
        elif offload.ratio < 1.0 or offload.super_offload:
            needed = "needed offload_optimizer.ratio 1.0 and super_offload false: they are other schedules of the same step"
            yield Refusal("zenflow", needed, "Keep one of the three.")
        if not self.compute_grad_norm:
            yield Refusal("compute_grad_norm", "needed true with zenflow", "Leave it out.")

    def _warn_of_idle_offload(self) -> None:
        """Offload at a stage that does not shard what is offloaded moves nothing: the user should know."""
        if self.offload_param is not None and self.offload_param.device != "none" and self.stage != 3:
            warn_once("offload_param", "zero_optimization.offload_param has no effect at stage %d: use stage 3", self.stage)
        if self.offload_optimizer is not None and self.offload_optimizer.device != "none" and self.stage == 0:
            warn_once(
                "offload_optimizer", "zero_optimization.offload_optimizer has no effect at stage 0: use stage 1, 2 or 3"
            )


def _is_below(first: int | str, second: int | str) -> bool:
    """Compare two intervals; "auto" is below nothing."""
    return isinstance(first, int) and isinstance(second, int) and first < second


def _move_offload(given: dict[str, object], old: str, new: str) -> Iterable[Refusal]:
    """Read the boolean `old` as a block `new` with device cpu."""
    if old not in given:
        return
    flag = given.pop(old)
    if flag is None or flag == "auto":
        return
    if not isinstance(flag, bool):
        yield Refusal(old, "needed true or false", f'Write {new} {{"device": "cpu"}} in its place.')
    elif given.get(new) is not None:
        yield Refusal(old, f'"{old}" and "{new}" are one setting', f'Keep "{new}" alone.')
    elif flag:
        given[new] = {"device": "cpu"}
