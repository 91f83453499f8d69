"""What turns gradients into new weights, chosen: reducer, masters, the engine's optimizer.

    gradients --> zero.reducer --> their mean --> zero.master (in memory, with a thread, on disk, ZenFlow) --> weights
                                                  `--- stepped by zero.optimizer: norm, clip, loss scale ---'

Does not live here: what each part does (`zero`), the torch optimizer (`basic_optimizer`). Called by `engine.build`.
"""

from __future__ import annotations

from typing import Any

from deepspeed.engine.basic_optimizer import BasicOptimizer
from deepspeed.engine.loader import epoch_steps
from deepspeed.engine.partition import Partition
from deepspeed.engine.request import EngineRequest
from deepspeed.engine.tensor_parts import TensorParts
from deepspeed.engine.terms import Terms
from deepspeed.offload import placement
from deepspeed.precision.loss_scaler import NullScaler
from deepspeed.zero.coordinator import ParameterCoordinator
from deepspeed.zero.master import MasterWeights
from deepspeed.zero.optimizer import ZeroOptimizer
from deepspeed.zero.parameter_offload import ParameterOffload
from deepspeed.zero.reducer import GradientReducer
from deepspeed.zero.residence import Residence
from deepspeed.zero.state_io import carry_state
from deepspeed.zero.threaded import StepThread, ThreadedWeights
from deepspeed.zero.ties import Ties
from deepspeed.zero.zenflow.build import zenflow_weights

__all__ = ["build_training"]


def build_training(
    request: EngineRequest,
    terms: Terms,
    basic: BasicOptimizer,
    partition: Partition,
    residence: Residence,
    coordinator: ParameterCoordinator | None,
) -> ZeroOptimizer:
    """The engine's optimizer over `partition`, its reducer and masters in it. What `basic` had as state is carried over."""
    config = request.config
    client_state = {id(p): state for p, state in basic.optimizer.state.items() if state}
    reducer = _reducer(request, terms, partition, coordinator)
    master = _masters(request, terms, basic, partition, residence)
    carry_state(master, client_state)
    optimizer = ZeroOptimizer(
        master,
        reducer,
        terms.scaler,
        divisor=lambda: terms.accumulation.divisor,
        clip=config.gradient_clipping,
        gradient_multiplier=float(request.mesh.data_parallel.size) if config.gradient_allreduce_op == "sum" else 1.0,
        skips_nonfinite=config.bf16.check_grad_overflow if config.bf16.enabled else True,
        computes_norm=config.zero_optimization.compute_grad_norm,
        frozen=partition.frozen,
        ties=Ties(request.stage.axes),
        norm_axis=partition.axes.whole,
        counts=lambda flat: partition.axes.counts(flat.kind),
        copies=TensorParts.of(request.module, partition.axes.tensor.rank, partition.axes.tensor.size).copies,
        device=terms.device,
    )
    if config.zero_optimization.stage == 3:
        optimizer.parameter_offload = ParameterOffload(request.module, coordinator)
    return optimizer


def _reducer(
    request: EngineRequest, terms: Terms, partition: Partition, coordinator: ParameterCoordinator | None
) -> GradientReducer:
    zero = request.config.zero_optimization
    return GradientReducer(
        partition.trained,
        request.mesh.zero_group,
        axis_of=lambda flat: partition.axes.of_kind(flat.kind).data,
        is_boundary=lambda: terms.accumulation.is_backward_boundary,
        check_scaled=None if isinstance(terms.scaler, NullScaler) else terms.loss_guard.check,
        is_overlapped=zero.overlap_comm is not False,
        on_collected=coordinator.bucket_reduced if coordinator is not None else None,
        on_over=coordinator.backward_over if coordinator is not None else None,
        allows_unused=zero.ignore_unused_parameters or zero.stage not in (1, 2),
    )


def _masters(
    request: EngineRequest, terms: Terms, basic: BasicOptimizer, partition: Partition, residence: Residence
) -> MasterWeights:
    zero, trained = request.config.zero_optimization, partition.trained
    if zero.zenflow is not None and zero.stage > 0:
        steps = epoch_steps(request.training_data, request.config)
        return zenflow_weights(
            trained, basic.optimizer, zero.zenflow, steps, sub_group_numel=zero.sub_group_size, residence=residence
        )
    thread = None
    if zero.stage > 0 and basic.may_cut:
        is_apart = placement.is_host_apart(trained[0].device) if trained else False
        thread = StepThread.of(zero.offload_optimizer, is_host_apart=is_apart)
    settings: dict[str, Any] = {
        "is_elementwise": basic.may_cut,
        "sub_group_numel": zero.sub_group_size,
        "state_dtype": terms.policy.state,
        "residence": residence,
        "whole_axis": partition.axes.whole,
        "parts_axis": partition.axes.parts,
        "counts": (lambda flat: partition.axes.counts(flat.kind)) if partition.axes.has_replicas else None,
    }
    if thread is not None:
        return ThreadedWeights(trained, basic.optimizer, thread, **settings)
    return MasterWeights(trained, basic.optimizer, **settings)
