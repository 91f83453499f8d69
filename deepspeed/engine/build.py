"""Config and model become parts, parts become an engine: the one place that chooses.

module --> device (`terms`: device, precision, batch)
--> optimizer: client's object, client's callable, or the config's (`basic_optimizer`)
--> all ranks asked for the same (`alike`)? --> rank 0's values on every rank
--> flat groups and gradient stores, as the ZeRO stage says (`partition`), gathered by hooks
--> reducer, masters, the engine's optimizer (`training`)
--> frozen parameters and buffers in the model's dtype
--> schedule, loader, report, checkpoints (`checkpointing`) --> engine

Does not live here: what any part does. Called by `deepspeed.initialize` (`api`), once per engine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.memory import MemoryTable
from deepspeed.common.logging import get_logger
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.secrets import without_secrets
from deepspeed.engine.alike import check_alike, common_description, description
from deepspeed.engine.axes import ModelAxes
from deepspeed.engine.basic_optimizer import choose_optimizer, choose_schedule
from deepspeed.engine.checkpointing import Checkpointing
from deepspeed.engine.cuts import Cuts
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.expert_report import ExpertReport
from deepspeed.engine.experts import gather_experts_together, is_name_of_experts, refuse_for_experts, spread_experts
from deepspeed.engine.loader import build_loader
from deepspeed.engine.log_start import open_log, start_log
from deepspeed.engine.measured_schedule import MeasuredSchedule
from deepspeed.engine.partition import Partition, attach_gradient_stores, copy_from_first_rank, plan_partition
from deepspeed.engine.parts import EngineParts
from deepspeed.engine.pipeline import PipelineEngine
from deepspeed.engine.profiled_step import ProfiledStep, refuse_unwritable
from deepspeed.engine.random_state import start_alike
from deepspeed.engine.report import Cadence, StepReport
from deepspeed.engine.request import EngineRequest
from deepspeed.engine.same_inputs import SameInputs
from deepspeed.engine.stage import refuse_for_pipelines, refuse_own_norm
from deepspeed.engine.tensor_parts import TensorParts, refuse_for_parts
from deepspeed.engine.terms import Terms
from deepspeed.engine.tiers import optimizer_tier
from deepspeed.engine.training import build_training
from deepspeed.errors import ArgumentError, ConfigError, DeepSpeedError, MonitorError, UnbuiltFeatureError
from deepspeed.monitor import MonitorMaster
from deepspeed.offload.heap import give_back_freed
from deepspeed.ops.host_products import fast_products, may_pay
from deepspeed.pipe.module import PipelineModule
from deepspeed.precision.policy import DtypePolicy, cast_module, keep_batch_norm_exact
from deepspeed.topology.mesh import AxisGroup, ParallelMesh
from deepspeed.zero.coordinator import ParameterCoordinator, build_coordinator
from deepspeed.zero.external import attach_external_tables
from deepspeed.zero.flat import owner_of, release_owner
from deepspeed.zero.leaf import apply_leaf_config
from deepspeed.zero.optimizer import ZeroOptimizer
from deepspeed.zero.prefetch import GatherSettings
from deepspeed.zero.reducer import GradientReducer
from deepspeed.zero.shard import refuse_lost_writes, whole_shape
from deepspeed.zero.small import WholeParameters, publish_small, withdraw_small

logger = get_logger(__name__)

_Started = TypeVar("_Started")


def build_engine(request: EngineRequest) -> DeepSpeedEngine:
    """Choose the parts and join them. Collective over the data-parallel ranks of all stages."""
    is_pipeline = isinstance(request.module, PipelineModule)
    _refuse_unbuilt(request.mesh, is_pipeline=is_pipeline)
    if isinstance(request.module, PipelineModule):
        refuse_for_pipelines(request.config, request.module)
    _refuse_cut_by_torch(request.module)
    terms = Terms.of(request.config, request.mesh)
    engine = (PipelineEngine if is_pipeline else DeepSpeedEngine)(_choose_parts(request, terms))
    give_back_freed(request.config.zero_optimization)
    start_log(engine, request, terms)
    if engine._parts.report.cadence.logged and isinstance(engine, PipelineEngine) and engine.optimizer is not None:
        MeasuredSchedule(engine, get_accelerator().synchronize).start()
    if engine._parts.report.cadence.profiled_step >= 0:
        _profile(engine, is_pipeline=is_pipeline)
    if request.config.dump_state:
        _dump(engine)
    if request.config.disable_python_gc:
        gc.collect()
        gc.disable()
    return engine


def _profile(engine: DeepSpeedEngine, *, is_pipeline: bool) -> None:
    forwards = (engine.module, "forward_chunk") if is_pipeline else (engine, "forward")
    profiled = ProfiledStep(engine, engine._parts.report.cadence.profiled_step, [forwards])
    engine.flops_profiler = profiled.profiler
    profiled.start()


def _choose_parts(request: EngineRequest, terms: Terms) -> EngineParts:
    module, config, mesh = request.module, request.config, request.mesh
    module.to(terms.device)
    keep_batch_norm_exact(module)
    _refuse_foreign_cast(module, terms.policy)
    axes = ModelAxes.of(mesh, config.zero_optimization.stage)
    products = _products(module, config, terms)
    basic = choose_optimizer(request)
    optimizer = basic.optimizer if basic is not None else None
    if mesh.axis("expert").size > 1:
        refuse_for_experts(config)
    refuse_own_norm(optimizer, module)
    refuse_for_parts(config, optimizer, TensorParts.of(module, axes.tensor.rank, axes.tensor.size))
    _make_alike(request, optimizer, terms, axes)
    start_alike(axes.tensor)
    tier = optimizer_tier(config, mesh.zero_group, terms.device, optimizer)
    partition = plan_partition(module, config, axes, terms.policy, optimizer, tier, request.stage)
    attach_gradient_stores(partition, config, terms.policy, tier)
    coordinator = _coordinator(module, config, partition)
    trained = None
    if basic is not None:
        residence = tier.residence(partition.trained, basic.optimizer, terms.policy)
        trained = build_training(request, terms, basic, partition, residence, coordinator)
    for flat in partition.flats:
        flat.on_replaced = partial(_let_go, partition, coordinator, trained.reducer if trained is not None else None)
    cast_module(module, terms.policy)
    report = _report(request, terms, trains=trained is not None)
    return EngineParts(
        module=module,
        config=config,
        mesh=mesh,
        device=terms.device,
        batch=terms.batch,
        accumulation=terms.accumulation,
        loss_guard=terms.loss_guard,
        report=report,
        communication_data_type=terms.policy.communication or torch.float32,
        partition=partition,
        checkpointing=_checkpointing(config, mesh, trained),
        stage=request.stage,
        of_experts=is_name_of_experts(module),
        products=products,
        cuts=Cuts.of_mesh(module, mesh),
        same_inputs=SameInputs(mesh.axis("tensor"), terms.device),
        coordinator=coordinator,
        optimizer=trained,
        reducer=trained.reducer if trained is not None else None,
        small=_publish_small(module, axes) if config.zero_optimization.stage == 3 else (),
        basic_optimizer=optimizer,
        client_optimizer=request.optimizer,
        lr_scheduler=choose_schedule(request, optimizer),
        client_lr_scheduler=request.lr_scheduler,
        dataloader=_loader(request, report),
        collate_fn=request.collate_fn,
        mpu=request.mpu,
        input_dtype=torch.float16 if config.fp16.enabled and config.fp16.auto_cast else None,
        autocast_dtype=terms.policy.autocast,
        unmanaged=_unmanaged(module, trained),
        frozen={name: p for name, p in module.named_parameters() if trained is not None and not p.requires_grad},
    )


def _refuse_unbuilt(mesh: ParallelMesh, *, is_pipeline: bool) -> None:
    if not is_pipeline and mesh.axis("pipe").size > 1:
        raise UnbuiltFeatureError(
            f"the mpu given to initialize() has {mesh.axis('pipe').size} pipeline stages, which this engine knows of a "
            "PipelineModule alone. Give the stages to PipelineModule(topology=...), or use a size of 1."
        )


def _products(module: nn.Module, config: DeepSpeedConfig, terms: Terms) -> Callable[[], AbstractContextManager[object]]:
    """`ops.host_products` where it may pay. A schedule that puts products off sees to it itself (`pipe.late_weights`)."""
    weights = ((whole_shape(param), terms.policy.param_for(param)) for param in module.parameters())
    is_late = isinstance(module, PipelineModule) and config.pipeline.schedule == "zero_bubble"
    return partial(fast_products, terms.device) if not is_late and may_pay(weights, terms.device) else nullcontext


def _refuse_cut_by_torch(module: nn.Module) -> None:
    """A DTensor has a mesh of its own and is no plain memory: no flat buffer can hold it."""
    for name, param in module.named_parameters():
        mesh = getattr(param, "device_mesh", None)
        if mesh is not None and hasattr(param, "placements"):
            raise ArgumentError(
                f"parameter {name!r} is a DTensor {param.placements} over {mesh.size()} ranks; initialize() needs plain "
                "parameters. Build the model without tp_plan, tp_size, distributed_config, parallelize_module or "
                f'fully_shard, and give the config "tensor_parallel": {{"autotp_size": {mesh.size()}}} for parts of layers, '
                'or "zero_optimization": {"stage": 3} for sharded parameters.'
            )


def _refuse_foreign_cast(module: nn.Module, policy: DtypePolicy) -> None:
    """An engine without optimizer may share a model with one that trains it, but not in another dtype."""
    for name, param in module.named_parameters():
        if owner_of(param) is not None and policy.param_for(param) != param.dtype:
            raise ArgumentError(
                f"{name!r} is {param.dtype} and belongs to an engine; this config would make it {policy.param_for(param)}. "
                "Call destroy() on that engine first, give this one a copy of the model, or use the same precision."
            )


def _make_alike(request: EngineRequest, optimizer: Optimizer | None, terms: Terms, axes: ModelAxes) -> None:
    """Free the model from earlier engines; then ranks that hold the same have the first one's values.

    Ranks that were not asked for the same are told so.
    """
    module, config = request.module, request.config
    _release_earlier_engines(module, config, optimizer)
    refuse_lost_writes(module.parameters())
    apply_leaf_config(module, config.zero_optimization.leaf_module)
    if config.zero_optimization.stage == 3:
        gather_experts_together(module)
    check_alike(description(config, module, optimizer), axes.dense.data, terms.device)
    for axis in ("pipe", "tensor"):
        check_alike(common_description(config, optimizer), request.mesh.axis(axis), terms.device)
    copy_from_first_rank(module, axes)


def _release_earlier_engines(module: nn.Module, config: DeepSpeedConfig, basic: Optimizer | None) -> None:
    """An engine that holds parameters takes them over whole: the earlier engine lets go of all it has, on all ranks."""
    if basic is not None or config.zero_optimization.stage == 3:
        for param in module.parameters():
            release_owner(param)
        withdraw_small(module.parameters())


def _publish_small(module: nn.Module, axes: ModelAxes) -> tuple[WholeParameters, ...]:
    of_experts = spread_experts(module)
    of_rank, alike = WholeParameters(axes.experts.shard, is_expert=True), WholeParameters(axes.dense.shard, is_expert=False)
    for is_expert, holder in ((True, of_rank), (False, alike)):
        publish_small((param for param in module.parameters() if (id(param) in of_experts) == is_expert), holder)
    return of_rank, alike


def _coordinator(module: nn.Module, config: DeepSpeedConfig, partition: Partition) -> ParameterCoordinator | None:
    if config.zero_optimization.stage < 3:
        return None
    attach_external_tables(module.modules())
    if not partition.sharded:
        return None
    settings = GatherSettings.from_config(config.zero_optimization)
    coordinator = build_coordinator(module, partition.units, partition.sharded, settings)
    for flat in partition.sharded:
        flat.publish_parameters()
        flat.before_edit.add(coordinator.before_edit)
    return coordinator


def _let_go(partition: Partition, coordinator: ParameterCoordinator | None, reducer: GradientReducer | None) -> None:
    """A newer engine takes parameters over: the module is as no engine had wrapped it. All ranks of the engine call it."""
    with ExitStack() as stack:  # the last one first: parameters become whole while there is something to gather them with
        for flat in partition.frozen:
            stack.callback(flat.release)
        if reducer is not None:
            stack.callback(reducer.remove)
        if coordinator is not None:
            stack.callback(coordinator.remove, gather=True)
        for optimizer in {flat.optimizer() for flat in partition.trained}:
            if isinstance(optimizer, ZeroOptimizer):
                stack.callback(optimizer.reload_states)  # parameters may be away: `offload_states`


def _report(request: EngineRequest, terms: Terms, *, trains: bool) -> StepReport:
    """Of an engine without an optimizer (a reference model) there are no steps to log: it leaves the file to who trains."""
    world = request.mesh.world
    cadence = Cadence.of(request.config).of_first(world, terms.device)
    if cadence.profiled_step >= 0:
        report_file = request.config.flops_profiler.output_file if request.mesh.rank == 0 else None
        _by_first(lambda: refuse_unwritable(report_file), ConfigError, "the report of flops_profiler", world, terms.device)
    return StepReport(
        request.config,
        _monitor(request.config, world, terms.device),
        request.mesh.zero_group,
        batch_size=terms.batch.train,
        synchronize=get_accelerator().synchronize,
        mark_memory=MemoryTable().mark,
        experts=ExpertReport(request.module, request.mesh.zero_group),
        cadence=cadence,
        log=open_log(request, cadence, terms) if trains else None,
    )


def _monitor(config: DeepSpeedConfig, world: AxisGroup, device: torch.device) -> MonitorMaster:
    """Start the monitors, which the first rank has. Collective over `world`: one broadcast."""
    return _by_first(lambda: MonitorMaster(config), MonitorError, "a monitor", world, device)


def _by_first(
    start: Callable[[], _Started], error: type[DeepSpeedError], what: str, world: AxisGroup, device: torch.device
) -> _Started:
    """What `start` gives; when it fails on the first rank, all raise. Collective over `world`: one broadcast."""
    own: Exception | None = None
    started: list[_Started] = []
    try:
        started.append(start())
    except Exception as raised:  # whatever a package raises: it is raised again below, when the others know
        own = raised
    if world.size > 1:
        has_failed = torch.tensor([float(own is not None)], device=device)
        comm.broadcast(has_failed, src=world.ranks[0], group=world.group)
        if has_failed.item() and world.rank > 0:
            raise error(
                f"rank {world.ranks[world.rank]}: {what} could not start on rank {world.ranks[0]}, which does it for all. "
                "Its own error says why, and what to do."
            )
    if own is not None:
        raise own
    return started[0]


def _loader(request: EngineRequest, report: StepReport) -> Any:
    if request.training_data is None:
        return None
    return build_loader(
        request.training_data,
        request.config,
        request.mesh,
        batch_size=request.config.train_micro_batch_size_per_gpu,
        collate_fn=request.collate_fn,
        throughput=report.throughput,
    )


def _checkpointing(config: DeepSpeedConfig, mesh: ParallelMesh, trained: ZeroOptimizer | None) -> Checkpointing:
    checkpointing = Checkpointing.of(config, mesh)
    if trained is not None:
        for calls in (trained.master.before_change, *(flat.before_edit for flat in trained.master.flats)):
            calls.add(checkpointing.saver.before_change)
    return checkpointing


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
