"""Config and model become parts, parts become an engine: the one place that chooses.

module --> device, frozen parameters and buffers in the model's dtype
--> optimizer (client's object, client's callable, or the config's)
--> all ranks asked for the same (`engine.alike`)? --> rank 0's values on every rank
--> flat groups and gradient stores, as the ZeRO stage says (`engine.partition`)
--> hooks, masters, the engine's optimizer
--> schedule, loader, report --> engine

Does not live here: what any part does. Called by `deepspeed.initialize` (`api`), once per engine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.memory import see_memory_usage
from deepspeed.checkpoint.agreement import ranks_of
from deepspeed.checkpoint.save.background import Saver
from deepspeed.checkpoint.save.engines import checkpoint_engine_of, plan_of
from deepspeed.checkpoint.save.nodes import NodeShares, find_nodes
from deepspeed.checkpoint.save.tiers import tiers_of
from deepspeed.checkpoint.save.write_share import WriteShares, own_place
from deepspeed.comm.world import get_local_rank
from deepspeed.common.logging import get_logger
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.batch import BatchSizes
from deepspeed.config.checkpoint import WriterConfig
from deepspeed.config.secrets import without_secrets
from deepspeed.engine.accumulation import Accumulation
from deepspeed.engine.alike import check_alike, description
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.loader import build_loader, epoch_steps
from deepspeed.engine.loss_guard import LossGuard
from deepspeed.engine.partition import Partition, attach_gradient_stores, copy_from_first_rank, plan_partition
from deepspeed.engine.parts import EngineParts
from deepspeed.engine.report import StepReport
from deepspeed.engine.tiers import OptimizerTier, check_offloaded, is_offloaded, optimizer_tier
from deepspeed.errors import ArgumentError, UnbuiltFeatureError
from deepspeed.monitor import MonitorMaster
from deepspeed.offload import placement
from deepspeed.offload.heap import give_back_freed
from deepspeed.optim import build_optimizer, build_scheduler, check_shardable, client_optimizer, client_scheduler
from deepspeed.optim.build import LRSchedule
from deepspeed.precision.loss_scaler import LossScaler, NullScaler, build_loss_scaler
from deepspeed.precision.policy import DtypePolicy, cast_module, keep_batch_norm_exact
from deepspeed.topology.mesh import ParallelMesh
from deepspeed.zero.coordinator import ParameterCoordinator, build_coordinator
from deepspeed.zero.external import attach_external_tables
from deepspeed.zero.flat import owner_of, release_owner
from deepspeed.zero.leaf import apply_leaf_config
from deepspeed.zero.master import MasterWeights
from deepspeed.zero.optimizer import ZeroOptimizer
from deepspeed.zero.prefetch import GatherSettings
from deepspeed.zero.reducer import GradientReducer
from deepspeed.zero.residence import Residence
from deepspeed.zero.shard import refuse_lost_writes
from deepspeed.zero.state_io import carry_state
from deepspeed.zero.threaded import StepThread, ThreadedWeights
from deepspeed.zero.zenflow.build import zenflow_weights

logger = get_logger(__name__)


@dataclass(frozen=True)
class EngineRequest:
    """What `deepspeed.initialize` was asked for, resolved."""

    module: nn.Module
    config: DeepSpeedConfig
    mesh: ParallelMesh
    optimizer: Any = None
    model_parameters: list[Any] | None = None
    training_data: Any = None
    lr_scheduler: Any = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    mpu: Any = None


def build_engine(request: EngineRequest) -> DeepSpeedEngine:
    """Choose the parts and join them. Collective over the data-parallel ranks."""
    config, mesh = request.config, request.mesh
    _refuse_unbuilt(mesh)
    device = torch.device(get_accelerator().device_name(get_local_rank()))
    module = request.module.to(device)
    policy = DtypePolicy.from_config(config, device.type)
    scaler = build_loss_scaler(config, device.type)
    batch = BatchSizes(config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)
    accumulation = Accumulation(batch.accumulation, is_managed=config.managed_gradient_accumulation)
    guard = LossGuard(scaler)
    keep_batch_norm_exact(module)
    _refuse_foreign_cast(module, policy)
    basic = _basic_optimizer(request)
    may_cut = basic is not None and _may_cut(basic, request)
    if basic is not None:
        check_offloaded(basic, config, is_clients=request.optimizer is not None, may_cut=may_cut)
    _release_earlier_engines(module, config, basic)
    refuse_lost_writes(module.parameters())
    apply_leaf_config(module, config.zero_optimization.leaf_module)
    check_alike(description(config, module, basic), mesh.data_parallel, device)
    copy_from_first_rank(module, mesh.data_parallel)
    tier = optimizer_tier(config, mesh.data_parallel, device, basic)
    partition = plan_partition(module, config, mesh, policy, basic, tier)
    attach_gradient_stores(partition, config, policy, mesh, tier)
    coordinator = _coordinator(module, config, partition)
    trained = None
    if basic is not None:
        trained = _train_parts(request, basic, may_cut, policy, partition, tier, coordinator, scaler, accumulation, guard)
    cast_module(module, policy)
    report = StepReport(
        config,
        MonitorMaster(config),
        mesh.data_parallel,
        batch_size=batch.train,
        synchronize=get_accelerator().synchronize,
        mark_memory=lambda label: see_memory_usage(label, force=True),
    )
    checkpoint_engine = checkpoint_engine_of(config.checkpoint, config.datastates_ckpt)
    plan = plan_of(config.checkpoint, config.datastates_ckpt, config.zero_optimization.stage)
    tiers = tiers_of(config.checkpoint, config.nebula)
    nodes = find_nodes(ranks_of(mesh.rank, mesh.world_size)) if config.checkpoint.use_node_local_storage else None
    saver = Saver(plan, mesh.rank, mesh.world_size, checkpoint_engine, tiers, nodes)
    checkpoint_engine.wait_for_save = saver.wait
    parts = EngineParts(
        module=module,
        config=config,
        mesh=mesh,
        device=device,
        batch=batch,
        accumulation=accumulation,
        loss_guard=guard,
        report=report,
        communication_data_type=policy.communication or torch.float32,
        partition=partition,
        saver=saver,
        checkpoint_engine=checkpoint_engine,
        write_shares=_write_shares(config.checkpoint.writer, mesh) if nodes is None else NodeShares(mesh.rank, nodes),
        nodes=nodes,
        coordinator=coordinator,
        optimizer=trained,
        reducer=trained.reducer if trained is not None else None,
        basic_optimizer=basic,
        client_optimizer=request.optimizer,
        lr_scheduler=_schedule(request, basic),
        client_lr_scheduler=request.lr_scheduler,
        dataloader=_loader(request, batch, report),
        collate_fn=request.collate_fn,
        mpu=request.mpu,
        input_dtype=torch.float16 if config.fp16.enabled and config.fp16.auto_cast else None,
        autocast_dtype=policy.autocast,
        unmanaged=_unmanaged(module, trained),
        frozen={name: p for name, p in module.named_parameters() if trained is not None and not p.requires_grad},
    )
    engine = DeepSpeedEngine(parts)
    give_back_freed(config.zero_optimization)
    if config.dump_state:
        _dump(engine)
    if config.disable_python_gc:
        gc.collect()
        gc.disable()
    return engine


def _write_shares(writer: WriterConfig | None, mesh: ParallelMesh) -> WriteShares:
    """Collective over the world where ranks must tell each other where they run."""
    unit = None if writer is None else writer.data_parallel
    if unit is None or unit == "REPLICA" or mesh.world_size == 1:
        return WriteShares(mesh.rank)
    places: list[Any] = [None] * mesh.world_size
    comm.all_gather_object(places, own_place(unit))
    return WriteShares(mesh.rank, dict(enumerate(places)))


def _refuse_unbuilt(mesh: ParallelMesh) -> None:
    for axis in ("tensor", "pipe", "sequence"):
        if mesh.axis(axis).size > 1:
            raise UnbuiltFeatureError(
                f"the mpu given to initialize() has a {axis}-parallel size of {mesh.axis(axis).size}, which is not "
                "built yet. Use data parallelism only (no mpu), or wait for the version that has it."
            )


def _coordinator(module: nn.Module, config: DeepSpeedConfig, partition: Partition) -> ParameterCoordinator | None:
    if not partition.sharded:
        return None
    attach_external_tables(module.modules())
    settings = GatherSettings.from_config(config.zero_optimization)
    coordinator = build_coordinator(module, partition.units, partition.sharded, settings, partition.shard_axis)
    for flat in partition.sharded:
        flat.publish_parameters()
        flat.before_edit = coordinator.before_edit
    return coordinator


def _refuse_foreign_cast(module: nn.Module, policy: DtypePolicy) -> None:
    """An engine without optimizer may share a model with one that trains it, but not in another dtype."""
    for name, param in module.named_parameters():
        if owner_of(param) is not None and policy.param_for(param) != param.dtype:
            raise ArgumentError(
                f"{name!r} is {param.dtype} and belongs to an engine; this config would make it {policy.param_for(param)}. "
                "Call destroy() on that engine first, give this one a copy of the model, or use the same precision."
            )


# -- optimizer and schedule -------------------------------------------------------------------------------------------


def _basic_optimizer(request: EngineRequest) -> Optimizer | None:
    optimizer, block, parameters = request.optimizer, request.config.optimizer, request.model_parameters
    names: dict[Tensor, str] = {param: name for name, param in request.module.named_parameters()}
    if parameters is None:
        parameters = [param for param in names if param.requires_grad]
    if optimizer is not None:
        return client_optimizer(optimizer, parameters, names=names)
    if block is None or not parameters:
        return None
    zero = request.config.zero_optimization
    return build_optimizer(
        block,
        parameters,
        on_host=is_offloaded(request.config),
        for_zenflow=zero.zenflow is not None and zero.stage > 0,
        names=names,
    )


def _may_cut(basic: Optimizer, request: EngineRequest) -> bool:
    """Whether the optimizer may be handed ranges that cut parameters; raises when it cannot train at this ZeRO stage."""
    stage = request.config.zero_optimization.stage
    return check_shardable(
        basic,
        stage=stage,
        shard_world_size=request.mesh.data_parallel.size if stage >= 1 else 1,
        allows_untested=request.config.zero_allow_untested_optimizer,
    )


def _schedule(request: EngineRequest, basic: Optimizer | None) -> LRSchedule | None:
    scheduler, block = request.lr_scheduler, request.config.scheduler
    if basic is None:
        if scheduler is not None:
            raise ArgumentError(
                "initialize(lr_scheduler=...) without an optimizer: there are no rates. Give it an optimizer."
            )
        return None
    if scheduler is not None:
        return client_scheduler(scheduler, basic)
    return build_scheduler(block, basic) if block is not None else None


def _loader(request: EngineRequest, batch: BatchSizes, report: StepReport) -> Any:
    if request.training_data is None:
        return None
    return build_loader(
        request.training_data,
        request.config,
        request.mesh,
        batch_size=batch.micro,
        collate_fn=request.collate_fn,
        throughput=report.throughput,
    )


# -- training ---------------------------------------------------------------------------------------------------------


def _train_parts(
    request: EngineRequest,
    basic: Optimizer,
    may_cut: bool,
    policy: DtypePolicy,
    partition: Partition,
    tier: OptimizerTier,
    coordinator: ParameterCoordinator | None,
    scaler: LossScaler,
    accumulation: Accumulation,
    guard: LossGuard,
) -> ZeroOptimizer:
    config, axis = request.config, request.mesh.data_parallel
    zero = config.zero_optimization
    reducer = GradientReducer(
        partition.trained,
        axis,
        is_boundary=lambda: accumulation.is_backward_boundary,
        check_scaled=None if isinstance(scaler, NullScaler) else guard.check,
        is_overlapped=zero.overlap_comm is not False,
        on_collected=coordinator.bucket_reduced if coordinator is not None else None,
        on_over=coordinator.backward_over if coordinator is not None else None,
        allows_unused=zero.ignore_unused_parameters or zero.stage not in (1, 2),
    )
    client_state = {id(p): state for p, state in basic.state.items() if state}
    master = _masters(request, partition, tier.residence(partition.trained, basic, policy), basic, may_cut, policy)
    carry_state(master, client_state)
    return ZeroOptimizer(
        master,
        reducer,
        scaler,
        divisor=lambda: accumulation.divisor,
        clip=config.gradient_clipping,
        gradient_multiplier=float(axis.size) if config.gradient_allreduce_op == "sum" else 1.0,
        skips_nonfinite=config.bf16.check_grad_overflow if config.bf16.enabled else True,
        computes_norm=zero.compute_grad_norm,
        frozen=partition.frozen,
    )


def _masters(
    request: EngineRequest,
    partition: Partition,
    residence: Residence,
    basic: Optimizer,
    may_cut: bool,
    policy: DtypePolicy,
) -> MasterWeights:
    zero, trained = request.config.zero_optimization, partition.trained
    if zero.zenflow is not None and zero.stage > 0:
        steps = epoch_steps(request.training_data, request.config)
        return zenflow_weights(trained, basic, zero.zenflow, steps, sub_group_numel=zero.sub_group_size, residence=residence)
    thread = None
    if zero.stage > 0 and may_cut:
        is_apart = placement.is_host_apart(trained[0].device) if trained else False
        thread = StepThread.of(zero.offload_optimizer, is_host_apart=is_apart)
    settings: dict[str, Any] = {
        "is_elementwise": may_cut,
        "sub_group_numel": zero.sub_group_size,
        "state_dtype": policy.state,
        "residence": residence,
    }
    if thread is not None:
        return ThreadedWeights(trained, basic, thread, **settings)
    return MasterWeights(trained, basic, **settings)


def _release_earlier_engines(module: nn.Module, config: DeepSpeedConfig, basic: Optimizer | None) -> None:
    """An engine that holds parameters takes them over whole: the earlier engine lets go of all it has, on all ranks."""
    if basic is not None or config.zero_optimization.stage == 3:
        for param in module.parameters():
            release_owner(param)


def _unmanaged(module: nn.Module, trained: ZeroOptimizer | None) -> tuple[nn.Parameter, ...]:
    if trained is None:
        return ()
    managed = {id(member.param) for flat in trained.master.flats for member in flat.members}
    return tuple(p for p in module.parameters() if p.requires_grad and id(p) not in managed)


def _dump(engine: DeepSpeedEngine) -> None:
    if engine.global_rank == 0:
        shown = {"world_size": engine.world_size, "device": engine.device, "optimizer": engine.optimizer}
        for name, value in {**shown, **without_secrets(engine.config)}.items():
            logger.info("dump_state: %s = %s", name, value)
