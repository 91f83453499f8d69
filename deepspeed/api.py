"""The public entry points: `initialize`, and `load_ds_config`, which reads a config without checking it.

args, model, config ---> comm.world (process group) ---> config (every fault at once) ---> topology.mesh
---> engine.build (chooses the parts) ---> engine.resuming (`elasticity.auto_resume`)
---> engine, optimizer, loader, schedule

In a job of `deepspeed verify` the config may be replaced by its stage 0, and the engine is recorded. In one of
`deepspeed --profile-steps` the first engine that trains is traced.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from deepspeed.accelerator import get_accelerator
from deepspeed.activations.checkpointing import adopt
from deepspeed.comm.places import get_world_size
from deepspeed.comm.recorder import configure
from deepspeed.comm.world import init_distributed
from deepspeed.common.logging import log_dist, set_log_level_from_string
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.arguments import config_from_args
from deepspeed.config.load import load_config
from deepspeed.elasticity.elasticity import ensure_immutable_elastic_config
from deepspeed.engine.build import build_engine
from deepspeed.engine.degrees import Degrees, check_group, group_source, with_recorded, without_tensor_ranks
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.experts import place_experts
from deepspeed.engine.log_start import host_nbytes_beside
from deepspeed.engine.recording import StepRecorder
from deepspeed.engine.request import EngineRequest
from deepspeed.engine.resuming import resume_newest
from deepspeed.engine.traced_steps import TracedSteps
from deepspeed.errors import ArgumentError, UnbuiltFeatureError
from deepspeed.launcher.restarts import restarts
from deepspeed.launcher.tracing import Tracing
from deepspeed.launcher.verification import Verification
from deepspeed.moe.auto_ep import apply_auto_ep
from deepspeed.pipe.module import PipelineModule
from deepspeed.precision.policy import DtypePolicy
from deepspeed.tensor_parallel.auto import apply_auto_tp
from deepspeed.tensor_parallel.recorded import Recorded, recorded_for
from deepspeed.topology.groups import set_current
from deepspeed.topology.mesh import ParallelMesh
from deepspeed.version import version
from deepspeed.zero.init_context import init_suspended

DeepSpeedOptimizerCallable = Callable[[Iterable[nn.Parameter]], Optimizer]
DeepSpeedSchedulerCallable = Callable[[Optimizer], Any]

_engines = itertools.count()  # numbers of the engines of this process, for `deepspeed verify`
_traced = itertools.count()  # of those that train, for `deepspeed --profile-steps`


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | DeepSpeedOptimizerCallable | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int | str = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: tuple[int, ...] | None = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Wrap `model` so that all ranks train it as one process would.

    Call on every rank. Collective: starts the process group unless there is one, and copies rank 0's weights to all.
    The model's parameters become views of flat buffers, in the dtype that the config asks for.

    Args:
        args: anything with a `deepspeed_config` (path, base64 or dict) and perhaps `local_rank`; a dict works too.
        model: the module to train.
        optimizer: a torch optimizer, or a callable that takes the parameters; wins over the config's.
        model_parameters: parameters or group dicts for the optimizer; all trainable parameters if left out.
        training_data: a dataset; the third result is a loader of this rank's micro-batches.
        lr_scheduler: a schedule, or a callable that takes the torch optimizer; wins over the config's.
        distributed_port: port of the rendezvous when it has to be made here.
        mpu: an object with `get_data_parallel_rank()` and the like, when the caller made the groups.
        dist_init_required: False refuses to start a process group; None starts one when needed.
        collate_fn: for the loader.
        config: dict, path of a JSON or HJSON file, or base64.
        mesh_param: sizes of (data, sequence) parallelism.
        config_params: the same as `config`, under its older name.

    Returns:
        (engine, optimizer or None, loader or None, schedule or None)

    Raises:
        ArgumentError: no model, no config or two of them.
        ConfigError: everything that is wrong with the config.
        CheckpointError: `elasticity.auto_resume` names a folder whose checkpoints are all damaged, or do not fit the model.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"initialize(model={model!r}): a torch.nn.Module is needed. Pass the model to train.")
    verification = Verification.from_environ(os.environ)
    source = _one_config(args, config, config_params)
    if verification is not None:
        source = verification.config(load_config(source))
    _join(distributed_port, dist_init_required)
    parsed, mesh = _placed(model, source, mpu, mesh_param)
    _apply_to_process(parsed)
    parameters = None if model_parameters is None else list(model_parameters)
    adopt(parsed, mesh.axis("tensor"))
    given = (optimizer, parameters, training_data, lr_scheduler, collate_fn, mpu)
    request = EngineRequest(model, parsed, mesh, *given, restarts=restarts(os.environ))
    if parsed.run_log.enabled:
        request = dataclasses.replace(request, plan=_plan_of(request), host_nbytes=host_nbytes_beside(model))
    engine = _start_engine(request, verification)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _one_config(args: Any, config: Any, config_params: Any) -> Any:
    given = {"config": config, "config_params": config_params, "args.deepspeed_config": config_from_args(args)}
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) != 1:
        names = " and ".join(found) or "nothing"
        raise ArgumentError(
            f"initialize() got its config from {names}: exactly one source is needed. Pass config=<dict, path or base64>, "
            "or --deepspeed_config on the command line."
        )
    return next(iter(found.values()))


def _join(port: int | str, is_required: bool | None) -> None:
    init_distributed(
        dist_backend=get_accelerator().communication_backend_name(),
        distributed_port=port,
        dist_init_required=is_required,
        verbose=False,
    )


def _placed(
    model: nn.Module, source: Any, mpu: Any, mesh_param: tuple[int, ...] | None
) -> tuple[DeepSpeedConfig, ParallelMesh]:
    """The checked config, and the ranks' places: layers are cut and experts spread over them."""
    recorded = recorded_for(model)
    source = with_recorded(source, recorded)
    raw = load_config(source)
    mpu, tensor_group = group_source(raw, recorded, mpu)
    mesh = _mesh_of(model, mpu, Degrees.of(raw, mesh_param), mesh_param)
    check_group(tensor_group, mesh)
    parsed = _checked_config(source, mpu, mesh)
    _cut_layers(model, parsed, mesh, recorded)
    _spread_experts(model, parsed)
    return parsed, place_experts(model, mesh, data_first=parsed.use_data_before_expert_parallelism)


def _checked_config(source: Any, mpu: Any, mesh: ParallelMesh) -> DeepSpeedConfig:
    parsed = DeepSpeedConfig(without_tensor_ranks(source, mesh), mpu=mpu, dp_world_size=mesh.data_parallel.size)
    if parsed.elasticity.enabled:
        ensure_immutable_elastic_config(parsed.raw["elasticity"])
    return parsed


def _cut_layers(model: nn.Module, parsed: DeepSpeedConfig, mesh: ParallelMesh, recorded: Recorded | None) -> None:
    """AutoTP: layers of a model that knows nothing of ranks become parts, where the config asks for it."""
    dtype = DtypePolicy.from_config(parsed).param or torch.float32
    if recorded is not None and recorded.dtype not in (None, dtype):
        raise ArgumentError(
            f"tp_model_init(dtype={recorded.dtype}), but the config makes parameters {dtype} (bf16.enabled, fp16.enabled). "
            "Give the same."
        )
    block = parsed.tensor_parallel
    if max(block.autotp_size, block.tensor_parallel.tp_size) > 1:
        apply_auto_tp(model, block, mesh.axis("tensor"), leaves_experts=parsed.expert_parallel.enabled)


def _spread_experts(model: nn.Module, parsed: DeepSpeedConfig) -> None:
    """AutoEP: experts of a model that knows nothing of ranks become ones that `place_experts` finds."""
    if parsed.expert_parallel.enabled and isinstance(model, PipelineModule):
        raise UnbuiltFeatureError(
            "expert_parallel with a PipelineModule is not built yet. Leave it out; put MoE layers of "
            "deepspeed.moe.layer into the pipeline for experts over ranks."
        )
    apply_auto_ep(model, parsed.expert_parallel)


def _apply_to_process(parsed: DeepSpeedConfig) -> None:
    """What holds for all of this process, not for one engine: logging."""
    if parsed.is_given("comms_logger"):
        configure(deepspeed_config=parsed)
    if parsed.log_level is not None:
        set_log_level_from_string(parsed.log_level)
    log_dist(f"DeepSpeed info: version={version}, world size {get_world_size()}, {get_accelerator().device_name()}")


def _mesh_of(model: nn.Module, mpu: Any, degrees: Degrees, mesh_param: tuple[int, ...] | None) -> ParallelMesh:
    if isinstance(model, PipelineModule):
        if mpu is not None:
            raise ArgumentError(
                "initialize(model=PipelineModule, mpu=...): the module has the groups of its ranks already. Leave mpu out; "
                "PipelineModule(topology=...) says how ranks lie."
            )
        if degrees.sequence > 1:
            raise UnbuiltFeatureError(
                f"{degrees.sequence} sequence-parallel ranks with a PipelineModule are not built yet. Leave "
                "sequence_parallel_size and mesh_param out; long sequences fit a stage by recomputation "
                "(activation_checkpoint_interval of PipelineModule) and in tiles (deepspeed.sequence.tiled)."
            )
        mesh = model.mesh
        degrees.check(mesh, "topology of the PipelineModule")
    elif mpu is not None:
        mesh = ParallelMesh.from_mpu(mpu)
        degrees.check(mesh, "mpu")
    else:
        mesh = degrees.mesh(mesh_param)
    set_current(mesh)
    return mesh


def _plan_of(request: EngineRequest) -> dict[str, int] | None:
    """Bytes per rank by term, for the run log; None where the plan would not be this engine's."""
    config, mesh = request.config, request.mesh
    is_cut = isinstance(request.module, PipelineModule) or mesh.axis("tensor").size > 1 or config.expert_parallel.enabled
    trained = {id(param) for param in request.module.parameters() if param.requires_grad}
    is_whole = request.model_parameters is None or {id(param) for param in request.model_parameters} == trained
    if is_cut or config.optimizer is None or request.optimizer is not None or not is_whole:
        return None
    planning = importlib.import_module("deepspeed.planning.of_engine")  # only here: a training run has no use for its room
    terms: dict[str, int] = planning.terms_of_engine(
        request.module, config, mesh.zero_group.size, get_accelerator().device_name()
    )
    return terms


def _start_engine(request: EngineRequest, verification: Verification | None) -> DeepSpeedEngine:
    """Build the engine; give it what the newest checkpoint holds, and a recorder, where that is asked for."""
    with init_suspended():  # what is built here is no part of a model that `zero.Init` shards
        engine = build_engine(request)
    config = request.config
    if config.elasticity.auto_resume is not None:
        resume_newest(engine, config.elasticity.auto_resume)
    if verification is not None and engine.optimizer is not None:
        facts = {"stage": str(config.zero_optimization.stage), "ranks": str(get_world_size())}
        file = partial(verification.file, next(_engines))
        StepRecorder(engine, file, verification.steps, facts).start()
    tracing = Tracing.from_environ(os.environ)
    if tracing is not None and engine.optimizer is not None and next(_traced) == 0:
        TracedSteps(engine, tracing.first, tracing.last, Path(tracing.folder)).start()
    return engine


def load_ds_config(config: Any) -> Mapping[str, Any]:
    """The dict behind a path, base64 text or dict, before any check of its keys.

    Raises:
        ConfigError: not readable, or a key given twice.
    """
    return load_config(config)
