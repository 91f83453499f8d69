"""`DeepSpeedConfig`: a whole configuration, checked.

    dict | path | base64 --load--> dict --place--> top-level keys + blocks (monitor_config emptied, old forms moved)
         --models--> typed blocks --cross checks, batch triangle, features not built yet--> DeepSpeedConfig
                                                                   every fault of all of these --> one ConfigError

Lives here: which blocks there are, and the list of checks across them (`CROSS_CHECKS`). Does not live here: the keys of a
block (its own module), features not built yet (`config.unbuilt`). Called by `api`, and by clients as
`deepspeed.runtime.config.DeepSpeedConfig`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, cast

from pydantic import ConfigDict, PrivateAttr

from deepspeed.common.logging import warn_once
from deepspeed.config.base import ConfigModel, faults_of, parse, unknown_key
from deepspeed.config.batch import resolve_batch
from deepspeed.config.blocks import Block, OptionalBlock, blocks_of
from deepspeed.config.elastic_batch import elastic_sizes
from deepspeed.config.faults import Fault, FaultKind, raise_faults
from deepspeed.config.load import Source, load_config
from deepspeed.config.top import TopLevel
from deepspeed.config.unbuilt import unbuilt_faults
from deepspeed.config.walk import with_home
from deepspeed.errors import (
    ArgumentError,
    BatchSizeError,
    ElasticityConfigError,
    ElasticityIncompatibleWorldSize,
)

if TYPE_CHECKING:
    from deepspeed.config.checkpoint import CheckpointConfig, DataStatesConfig, NebulaConfig
    from deepspeed.config.compile import CompileConfig
    from deepspeed.config.compression import CompressionConfig, QuantizeTrainingConfig, WeightQuantizationConfig
    from deepspeed.config.data import CurriculumLearningConfig, DataEfficiencyConfig
    from deepspeed.config.elasticity import ElasticityConfig
    from deepspeed.config.memory import ActivationCheckpointingConfig, AioConfig
    from deepspeed.config.model import (
        EigenvalueConfig,
        HybridEngineConfig,
        ProgressiveLayerDropConfig,
        SparseAttentionConfig,
    )
    from deepspeed.config.monitor import (
        AimConfig,
        CometConfig,
        CsvMonitorConfig,
        MlflowConfig,
        PrometheusConfig,
        RunLogConfig,
        TensorBoardConfig,
        WandbConfig,
    )
    from deepspeed.config.observe import AutotuningConfig, CommsLoggerConfig, FlopsProfilerConfig, TimersConfig
    from deepspeed.config.optimizer import OptimizerConfig
    from deepspeed.config.parallel import ExpertParallelConfig, PipelineConfig, TensorParallelConfig
    from deepspeed.config.precision import AmpConfig, BF16Config, DataTypesConfig, FP16Config, TorchAutocastConfig
    from deepspeed.config.scheduler import SchedulerConfig
    from deepspeed.config.zero import ZeroConfig

__all__ = ["BLOCK_SPELLINGS", "CROSS_CHECKS", "MONITORS", "DeepSpeedConfig", "Mesh", "ParallelUnit"]

MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet", "mlflow", "aim", "prometheus")
BLOCK_SPELLINGS = {"bfloat16": "bf16", "data_states": "datastates_ckpt"}


class ParallelUnit(Protocol):
    """The part of a client's `mpu` object that a configuration asks: one of the two methods is enough."""

    def get_data_parallel_world_size(self) -> int:
        """Ranks that see different data."""

    def get_sequence_parallel_world_size(self) -> int:
        """Ranks that share a sequence."""


class Mesh(Protocol):
    """The part of a device mesh that a configuration asks."""

    mesh_dim_names: tuple[str, ...] | None

    def size(self, mesh_dim: int) -> int:
        """Ranks along a dimension."""


class DeepSpeedConfig(TopLevel):
    """A configuration: top-level keys as attributes of their names, and one typed model per block.

    The batch sizes are ints after construction. `optimizer` and `scheduler` are None when they were left out; other blocks
    that were left out hold their defaults.

    Args:
        source: dict, path of a JSON or HJSON file, or base64 of such a text; see `config.load`.
        mpu: a client's object that knows the parallel groups.
        mesh_device: a device mesh with a dimension named `data_parallel`.
        dp_world_size: ranks that see different data. Left out: what `mpu`, the mesh, or `world_size` say, else 1.
        world_size: ranks in all.

    Raises:
        ConfigError: every fault of the configuration; as BatchSizeError or UnbuiltFeatureError where these fit.
        ArgumentError: `mpu` does not tell the number of data-parallel ranks and neither does anything else.
    """

    model_config = ConfigDict(ignored_types=(Block, OptionalBlock))

    optimizer: ClassVar[OptionalBlock[OptimizerConfig]] = OptionalBlock("optimizer:OptimizerConfig")
    scheduler: ClassVar[OptionalBlock[SchedulerConfig]] = OptionalBlock("scheduler:SchedulerConfig")
    fp16: ClassVar[Block[FP16Config]] = Block("precision:FP16Config")
    bf16: ClassVar[Block[BF16Config]] = Block("precision:BF16Config")
    torch_autocast: ClassVar[Block[TorchAutocastConfig]] = Block("precision:TorchAutocastConfig")
    data_types: ClassVar[Block[DataTypesConfig]] = Block("precision:DataTypesConfig")
    amp: ClassVar[Block[AmpConfig]] = Block("precision:AmpConfig")
    zero_optimization: ClassVar[Block[ZeroConfig]] = Block("zero:ZeroConfig")
    activation_checkpointing: ClassVar[Block[ActivationCheckpointingConfig]] = Block("memory:ActivationCheckpointingConfig")
    aio: ClassVar[Block[AioConfig]] = Block("memory:AioConfig")
    checkpoint: ClassVar[Block[CheckpointConfig]] = Block("checkpoint:CheckpointConfig")
    nebula: ClassVar[Block[NebulaConfig]] = Block("checkpoint:NebulaConfig")
    datastates_ckpt: ClassVar[OptionalBlock[DataStatesConfig]] = OptionalBlock("checkpoint:DataStatesConfig")
    tensorboard: ClassVar[Block[TensorBoardConfig]] = Block("monitor:TensorBoardConfig")
    csv_monitor: ClassVar[Block[CsvMonitorConfig]] = Block("monitor:CsvMonitorConfig")
    wandb: ClassVar[Block[WandbConfig]] = Block("monitor:WandbConfig")
    comet: ClassVar[Block[CometConfig]] = Block("monitor:CometConfig")
    mlflow: ClassVar[Block[MlflowConfig]] = Block("monitor:MlflowConfig")
    aim: ClassVar[Block[AimConfig]] = Block("monitor:AimConfig")
    prometheus: ClassVar[Block[PrometheusConfig]] = Block("monitor:PrometheusConfig")
    run_log: ClassVar[Block[RunLogConfig]] = Block("monitor:RunLogConfig")
    comms_logger: ClassVar[Block[CommsLoggerConfig]] = Block("observe:CommsLoggerConfig")
    flops_profiler: ClassVar[Block[FlopsProfilerConfig]] = Block("observe:FlopsProfilerConfig")
    timers: ClassVar[Block[TimersConfig]] = Block("observe:TimersConfig")
    autotuning: ClassVar[Block[AutotuningConfig]] = Block("observe:AutotuningConfig")
    elasticity: ClassVar[Block[ElasticityConfig]] = Block("elasticity:ElasticityConfig")
    tensor_parallel: ClassVar[Block[TensorParallelConfig]] = Block("parallel:TensorParallelConfig")
    expert_parallel: ClassVar[Block[ExpertParallelConfig]] = Block("parallel:ExpertParallelConfig")
    pipeline: ClassVar[Block[PipelineConfig]] = Block("parallel:PipelineConfig")
    compile: ClassVar[Block[CompileConfig]] = Block("compile:CompileConfig")
    hybrid_engine: ClassVar[Block[HybridEngineConfig]] = Block("model:HybridEngineConfig")
    sparse_attention: ClassVar[OptionalBlock[SparseAttentionConfig]] = OptionalBlock("model:SparseAttentionConfig")
    progressive_layer_drop: ClassVar[Block[ProgressiveLayerDropConfig]] = Block("model:ProgressiveLayerDropConfig")
    eigenvalue: ClassVar[Block[EigenvalueConfig]] = Block("model:EigenvalueConfig")
    data_efficiency: ClassVar[Block[DataEfficiencyConfig]] = Block("data:DataEfficiencyConfig")
    curriculum_learning: ClassVar[Block[CurriculumLearningConfig]] = Block("data:CurriculumLearningConfig")
    compression_training: ClassVar[Block[CompressionConfig]] = Block("compression:CompressionConfig")
    quantize_training: ClassVar[Block[QuantizeTrainingConfig]] = Block("compression:QuantizeTrainingConfig")
    weight_quantization: ClassVar[OptionalBlock[WeightQuantizationConfig]] = OptionalBlock(
        "compression:WeightQuantizationConfig"
    )

    _raw: dict[str, Any] = PrivateAttr(default_factory=dict)
    _blocks: dict[str, ConfigModel] = PrivateAttr(default_factory=dict)
    _given: frozenset[str] = PrivateAttr(default=frozenset())

    def __init__(
        self,
        source: Source,
        mpu: ParallelUnit | None = None,
        mesh_device: Mesh | None = None,
        *,
        dp_world_size: int | None = None,
        world_size: int | None = None,
    ) -> None:
        raw = load_config(source)
        placed = _place(raw, blocks_of(type(self)))
        _, errors = parse(self._set_scalars, placed.scalars)
        self._raw = raw
        self._given = frozenset(placed.scalars) | frozenset(placed.blocks)
        scalar_faults = faults_of(errors)
        wrong = {fault.path for fault in scalar_faults}
        faults = [*placed.faults, *scalar_faults, *self._read_blocks(placed.blocks, wrong), *self._clip_as_optimizer_says()]
        self.wall_clock_breakdown = self.wall_clock_breakdown or self.flops_profiler.enabled
        faults += [fault for check in CROSS_CHECKS if check.concerns(self, wrong) for fault in check.find(self)]
        if not any(path in _BATCH_KEYS or path.startswith("elasticity") for path in wrong):
            faults += self._resolve_batch(_Places(mpu, mesh_device, dp_world_size, world_size))
        faults += unbuilt_faults(self)
        if faults:
            raise_faults([with_home(fault, type(self)) for fault in faults], _name(source))

    @property
    def raw(self) -> dict[str, Any]:
        """The configuration as it was given, as a dict of this object's own."""
        return self._raw

    @property
    def zero_config(self) -> ZeroConfig:
        """Old name of `zero_optimization`."""
        return self.zero_optimization

    @property
    def zero_enabled(self) -> bool:
        """Whether the ZeRO stage is above 0."""
        return self.zero_optimization.stage > 0

    @property
    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self.zero_optimization.stage

    @property
    def fp16_enabled(self) -> bool:
        """Whether the model is kept in fp16."""
        return self.fp16.enabled

    @property
    def bfloat16_enabled(self) -> bool:
        """Whether the model is kept in bf16."""
        return self.bf16.enabled

    def is_given(self, name: str) -> bool:
        """Whether the user wrote this block or top-level key."""
        return name in self._given

    def resolved(self) -> dict[str, Any]:
        """Return every key with its value, defaults included, as plain values for JSON."""
        blocks = {name: getattr(self, name) for name in blocks_of(type(self))}
        dumped = {name: block if block is None else block.model_dump(mode="json") for name, block in blocks.items()}
        return {**self.model_dump(mode="json"), **dumped}

    def _set_scalars(self, scalars: Any) -> DeepSpeedConfig:
        super().__init__(**scalars)
        return self

    def _read_blocks(self, given: Mapping[str, tuple[str, object]], wrong: set[str]) -> list[Fault]:
        """Build the models of the blocks; a broken one keeps what is right in it. Adds what is wrong under its own name."""
        faults: list[Fault] = []
        for name, (path, value) in given.items():
            model, errors = parse(blocks_of(type(self))[name].model.model_validate, cast("Mapping[str, object]", value))
            found = faults_of(errors, path)
            faults += [fault._replace(kind=FaultKind.ELASTIC) for fault in found] if name == "elasticity" else found
            wrong |= {fault.path for fault in faults_of(errors, name)}
            if model is not None:
                self._blocks[name] = model
        return faults

    def _clip_as_optimizer_says(self) -> list[Fault]:
        """Take the old `optimizer.params.max_grad_norm` over into `gradient_clipping`."""
        if self.optimizer is None or "max_grad_norm" not in self.optimizer.params:
            return []
        path, norm = "optimizer.params.max_grad_norm", self.optimizer.params.pop("max_grad_norm")
        if isinstance(norm, bool) or not isinstance(norm, (int, float)) or not norm >= 0:
            return [Fault(path, norm, "needed a number >= 0", "Write gradient_clipping at the top level.")]
        if norm == 0:
            return []
        if self.is_given("gradient_clipping") and self.gradient_clipping != norm:
            needed = f"needed gradient_clipping, {self.gradient_clipping:g}: both say where gradients are clipped"
            return [Fault(path, norm, needed, "Leave max_grad_norm out.")]
        warn_once(path, "%s is deprecated: write gradient_clipping = %g at the top level", path, norm)
        self.gradient_clipping = float(norm)
        return []

    def _resolve_batch(self, places: _Places) -> list[Fault]:
        """Make the three batch sizes ints."""
        ranks = places.dp_world_size(self)
        faults = []
        if self.data_parallel_size not in (None, ranks):
            faults.append(
                Fault("data_parallel_size", self.data_parallel_size, f"needed {ranks}, the ranks there are", "Leave it out.")
            )
        if self.is_given("elasticity") and self.elasticity.enabled:
            return [*faults, *self._take_elastic_batch(ranks)]
        given = (self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps)
        try:
            sizes = resolve_batch(*given, ranks)
        except BatchSizeError as error:
            return [*faults, Fault("train_batch_size", given[0], str(error), "", FaultKind.BATCH)]
        self.train_batch_size = sizes.train
        self.train_micro_batch_size_per_gpu = sizes.micro
        self.gradient_accumulation_steps = sizes.accumulation
        return faults

    def _take_elastic_batch(self, ranks: int) -> list[Fault]:
        """Make the three batch sizes those that `elasticity` chooses for `ranks` data-parallel ranks."""
        block = self.elasticity
        try:
            sizes = elastic_sizes(block, ranks * block.model_parallel_size)
        except ElasticityIncompatibleWorldSize as error:
            return [Fault("elasticity", ranks, str(error), "", FaultKind.ELASTIC_RANKS)]
        except ElasticityConfigError as error:
            return [Fault("elasticity", {}, str(error), "", FaultKind.ELASTIC)]
        chosen = dict(zip(_BATCH_KEYS, sizes, strict=False))
        for key, size in chosen.items():
            if self.is_given(key) and getattr(self, key) != size and block.ignore_non_elastic_batch_info:
                warn_once(("elasticity", key), "%s = %s is not used: elasticity chooses %d", key, getattr(self, key), size)
            setattr(self, key, size)
        return []


_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""In the order of `BatchSizes` and `ElasticSizes`."""


class _Places(NamedTuple):
    """What may tell how many ranks see different data."""

    mpu: ParallelUnit | None
    mesh: Mesh | None
    dp_ranks: int | None
    ranks: int | None

    def dp_world_size(self, config: TopLevel) -> int:
        """Ask them in order: the caller, `mpu`, the mesh, the configuration, else every rank."""
        if self.dp_ranks is not None:
            return self.dp_ranks
        if self.mpu is not None:
            if hasattr(self.mpu, "get_data_parallel_world_size"):
                return int(self.mpu.get_data_parallel_world_size())
            return self._share(int(self.mpu.get_sequence_parallel_world_size()))
        if self.mesh is not None:
            return _data_parallel_size(self.mesh)
        if self.ranks is None and config.data_parallel_size is not None:
            return config.data_parallel_size
        return self._share(config.sequence_parallel_size) if self.ranks is not None else 1

    def _share(self, sequence_ranks: int) -> int:
        """Divide all ranks by those that share a sequence."""
        ranks = 1 if self.ranks is None else self.ranks
        if ranks % sequence_ranks:
            given = "no world size" if self.ranks is None else f"world_size={ranks}"
            raise ArgumentError(
                f"{given} with {sequence_ranks} sequence-parallel ranks; needed a multiple of {sequence_ranks}. "
                "Pass dp_world_size, or the world size of the job."
            )
        return ranks // sequence_ranks


def _data_parallel_size(mesh: Mesh) -> int:
    names = mesh.mesh_dim_names or ()
    if "data_parallel" not in names:
        raise ArgumentError(f'the mesh has the dimensions {names}; needed one named "data_parallel". Name it so.')
    return mesh.size(names.index("data_parallel"))


class _Placed(NamedTuple):
    """A configuration sorted into what its parts are."""

    scalars: dict[str, object]
    blocks: dict[str, tuple[str, object]]
    """Block -> the path it was found at, and its value."""
    faults: list[Fault]


def _place(raw: Mapping[str, Any], blocks: Mapping[str, Block[Any] | OptionalBlock[Any]]) -> _Placed:
    """Sort keys into top-level ones and blocks; move blocks that stand at an old place or under an old name."""
    placed = _Placed({}, {}, [])
    beside: dict[str, object] = {}
    for key, value in raw.items():
        if key == "monitor_config":
            _place_monitors(value, placed)
        elif (name := BLOCK_SPELLINGS.get(key, key)) in blocks:
            _place_block(name, key, value, placed)
        elif key in TopLevel.model_fields:
            placed.scalars[key] = value
        elif _is_beside(key, blocks):
            beside[key] = value
        else:
            known = (*TopLevel.model_fields, *blocks, *BLOCK_SPELLINGS, "monitor_config")
            placed.faults.append(Fault(key, value, *unknown_key(key, "the top level", known)))
    for key, value in beside.items():
        _place_beside(key, value, blocks, placed)
    return placed


def _is_beside(key: str, blocks: Mapping[str, Block[Any] | OptionalBlock[Any]]) -> bool:
    name, _, inner = str(key).partition(".")
    return name in blocks and inner in blocks[name].model.known_keys()


def _place_beside(key: str, value: object, blocks: Mapping[str, Block[Any] | OptionalBlock[Any]], placed: _Placed) -> None:
    """Move `"zero_optimization.reduce_bucket_size": n` into the block, unless the block says otherwise.

    TRL writes such keys beside the block, in the configuration of reference models.
    """
    name, _, inner = key.partition(".")
    path, block = placed.blocks.get(name, (name, {}))
    spellings = blocks[name].model.spellings
    if isinstance(block, Mapping) and spellings.get(inner, inner) not in {spellings.get(k, k) for k in block}:
        placed.blocks[name] = (path, {**block, inner: value})


def _place_monitors(block: object, placed: _Placed) -> None:
    """Take the monitors out of a block around them."""
    if block is None:
        return
    if not isinstance(block, Mapping):
        placed.faults.append(Fault("monitor_config", block, "needed a block of keys", "Write {...}."))
        return
    for key, value in block.items():
        if key in MONITORS:
            _place_block(key, f"monitor_config.{key}", value, placed)
        else:
            placed.faults.append(Fault(f"monitor_config.{key}", value, *unknown_key(key, "monitor_config", MONITORS)))


def _place_block(name: str, path: str, value: object, placed: _Placed) -> None:
    """Note where a block was found; null and "auto" mean that it is not there."""
    if name in placed.blocks:
        both = f'"{placed.blocks[name][0]}" and "{path}" are one block'
        placed.faults.append(Fault(path, value, both, f'Keep "{name}" alone.'))
        return
    if name == "zero_optimization" and isinstance(value, bool):
        warn_once(
            "zero_optimization=bool", 'zero_optimization = true or false is deprecated: write {"stage": 1} or leave it out'
        )
        value = {"stage": int(value)}
    if name == "datastates_ckpt" and isinstance(value, bool):
        value = {} if value else None
    if value is not None and value != "auto":
        placed.blocks[name] = (path, value)


class CrossCheck(NamedTuple):
    """What blocks forbid each other."""

    find: Callable[[DeepSpeedConfig], Iterable[Fault]]
    reads: tuple[str, ...]
    """Keys or blocks it reads; when one of them is wrong in itself, the check is left out."""

    def concerns(self, config: DeepSpeedConfig, wrong: Iterable[str]) -> bool:
        """Whether something it reads was given, and nothing it reads is wrong in itself."""
        if not any(config.is_given(key.partition(".")[0]) for key in self.reads):
            return False
        return not any(path == key or key.startswith(f"{path}.") for path in wrong for key in self.reads)


def one_16_bit_format(config: DeepSpeedConfig) -> Iterable[Fault]:
    """`fp16` and `bf16` exclude each other."""
    if config.fp16.enabled and config.bf16.enabled:
        yield Fault("bf16.enabled", True, "needed false, since fp16.enabled is true", "Keep one of the two.")


def masters_follow_zero(config: DeepSpeedConfig) -> Iterable[Fault]:
    """16-bit masters and states are shards, so they need ZeRO."""
    if config.zero_optimization.stage > 0:
        return
    needed, cure = "needed zero_optimization.stage 1, 2 or 3 with it", "Leave it out, or choose a stage."
    if config.fp16.enabled and config.fp16.fp16_master_weights_and_grads:
        yield Fault("fp16.fp16_master_weights_and_grads", True, needed, cure)
    for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
        if config.bf16.enabled and getattr(config.bf16, key):
            yield Fault(f"bf16.{key}", True, needed, cure)


def parameters_have_the_mode(config: DeepSpeedConfig) -> Iterable[Fault]:
    """`data_types.param_dtype` may only repeat what the precision blocks say."""
    mode = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"
    stated = config.data_types.param_dtype
    if stated not in (None, mode):
        yield Fault(
            "data_types.param_dtype", stated, f"needed {mode}, as the fp16 and bf16 blocks say", "Change one of them."
        )


def amp_stands_alone(config: DeepSpeedConfig) -> Iterable[Fault]:
    """Apex goes neither with ZeRO nor with `fp16`."""
    if config.amp.enabled and (config.fp16.enabled or config.zero_optimization.stage > 0):
        yield Fault("amp.enabled", True, "needed false with fp16 or ZeRO", "Leave the amp block out.")


def clipping_needs_the_norm(config: DeepSpeedConfig) -> Iterable[Fault]:
    """Without the norm nothing can be clipped."""
    if not config.zero_optimization.compute_grad_norm and config.gradient_clipping > 0:
        needed = f"needed true with gradient_clipping {config.gradient_clipping:g}"
        yield Fault("zero_optimization.compute_grad_norm", False, needed, "Leave it out, or set gradient_clipping to 0.")


def zenflow_averages_over_full_masters(config: DeepSpeedConfig) -> Iterable[Fault]:
    """ZenFlow sums gradients over several updates: of their mean over ranks, for masters that do not round them away."""
    if config.zero_optimization.zenflow is None or config.zero_optimization.stage == 0:
        return
    if config.gradient_allreduce_op == "sum":
        needed = 'needed "mean" with zero_optimization.zenflow'
        yield Fault("gradient_allreduce_op", "sum", needed, "Leave it out.")
    for key, is_on in (
        ("fp16.fp16_master_weights_and_grads", config.fp16.enabled and config.fp16.fp16_master_weights_and_grads),
        ("bf16.bf16_master_weights_and_grads", config.bf16.enabled and config.bf16.bf16_master_weights_and_grads),
    ):
        if is_on:
            yield Fault(key, True, "needed false with zero_optimization.zenflow", "Leave one of the two out.")


def elasticity_chooses_the_batch(config: DeepSpeedConfig) -> Iterable[Fault]:
    """With elasticity on, batch sizes are its business."""
    if config.elasticity.enabled and not config.elasticity.ignore_non_elastic_batch_info:
        for key in sorted(_BATCH_KEYS):
            if config.is_given(key):
                cure = "Leave it out, or set elasticity.ignore_non_elastic_batch_info."
                needed = "needed none: elasticity.enabled chooses the batch"
                yield Fault(key, getattr(config, key), needed, cure, FaultKind.ELASTIC)


def tiers_copy_whole_folders(config: DeepSpeedConfig) -> Iterable[Fault]:
    """A node's own folder is not a whole checkpoint, so it cannot be copied to a persistent tier."""
    if config.nebula.enabled and config.nebula.persistent_storage_path and config.checkpoint.use_node_local_storage:
        needed = "needed false with nebula.persistent_storage_path, which takes checkpoints that are whole in one folder"
        yield Fault("checkpoint.use_node_local_storage", True, needed, "Leave one of the two out.")


CROSS_CHECKS: tuple[CrossCheck, ...] = (
    CrossCheck(one_16_bit_format, ("fp16.enabled", "bf16.enabled")),
    CrossCheck(masters_follow_zero, ("zero_optimization.stage", "fp16.enabled", "bf16.enabled")),
    CrossCheck(parameters_have_the_mode, ("fp16.enabled", "bf16.enabled", "data_types.param_dtype")),
    CrossCheck(amp_stands_alone, ("amp.enabled", "fp16.enabled", "zero_optimization.stage")),
    CrossCheck(clipping_needs_the_norm, ("zero_optimization.compute_grad_norm", "gradient_clipping")),
    CrossCheck(
        zenflow_averages_over_full_masters,
        ("zero_optimization.zenflow", "gradient_allreduce_op", "fp16.enabled", "bf16.enabled"),
    ),
    CrossCheck(elasticity_chooses_the_batch, ("elasticity.enabled",)),
    CrossCheck(tiers_copy_whole_folders, ("nebula.enabled", "checkpoint.use_node_local_storage")),
)
"""Checks across blocks; those inside one block are the `check` of its model."""


def _name(source: Source) -> str:
    """Call the source by something short."""
    if isinstance(source, Mapping):
        return "given as a dict"
    text = os.fspath(source)
    return text if os.path.exists(text) else "given as base64"
