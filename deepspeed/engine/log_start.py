"""The beginning of an engine's run log: the file of this rank, and the record that says what runs.

Called by `engine.build`. Does not live here: what follows (`engine.step_log`).
"""

from __future__ import annotations

import os
import socket
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.host_memory import HostMemory
from deepspeed.config.secrets import without_secrets
from deepspeed.engine.stage_facts import agreed
from deepspeed.engine.step_log import Memory, StepLog, next_engine, open_writer
from deepspeed.profiling.flops_profiler.peaks import peak_flops_of
from deepspeed.run_log import Start
from deepspeed.version import version
from deepspeed.zero.shard import whole_shape

if TYPE_CHECKING:
    from deepspeed.engine.engine import DeepSpeedEngine
    from deepspeed.engine.report import Cadence
    from deepspeed.engine.request import EngineRequest
    from deepspeed.engine.terms import Terms

__all__ = ["host_nbytes_beside", "open_log", "start_log"]

_TERA = 1e12


def open_log(request: EngineRequest, cadence: Cadence, terms: Terms) -> StepLog | None:
    """The log of this rank; None where it writes none. Collective over all ranks where the first one wants a log.

    The first rank says which of several engines this is: others may hold on to one that has gone there.

    Raises:
        ArgumentError: the file of a rank cannot be opened; on all ranks.
    """
    if not cadence.logged:
        return None
    block, world, rank = request.config.run_log, request.mesh.world, request.mesh.rank
    engine = torch.tensor([next_engine(block, rank)], device=terms.device)
    if world.size > 1:
        comm.broadcast(engine, src=world.ranks[0], group=world.group)
    number = int(engine)
    writer = agreed(lambda: open_writer(block, rank, number) if block.enabled else None, world)
    if writer is None:
        return None
    return StepLog(
        writer,
        is_first=rank == 0,
        batch_size=terms.batch.train,
        world_size=world.size,
        memory=partial(_memory, HostMemory(), terms.device),
    )


def start_log(engine: DeepSpeedEngine, request: EngineRequest, terms: Terms) -> None:
    """Write the first record."""
    if engine._parts.report.log.is_on:
        engine._parts.report.log.start(_start(engine, request, terms))


def host_nbytes_beside(module: nn.Module) -> int:
    """Bytes of this process's memory that are not the module's tensors: the interpreter, libraries, data of the script.

    What a process holds beyond them later is what training with the module takes, and what a memory plan tells.
    Asked once the plan is made, for planning loads libraries, too.
    """
    own = [*module.parameters(), *module.buffers()]
    own += [shard for each in own if isinstance(shard := getattr(each, "ds_tensor", None), torch.Tensor)]
    storages = [each.untyped_storage() for each in own if each.device.type == "cpu"]
    nbytes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return max(0, HostMemory().resident_nbytes() - sum(nbytes.values()))


def _start(engine: DeepSpeedEngine, request: EngineRequest, terms: Terms) -> Start:
    config, mesh, cuts = request.config, request.mesh, engine._parts.cuts
    shapes = [cuts.shape(name, whole_shape(param)) for name, param in engine.module.named_parameters()]
    return Start(
        version=version,
        rank=mesh.rank,
        world_size=mesh.world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=get_accelerator().product_name() or get_accelerator().device_name(),
        mesh=mesh.sizes,
        model=type(engine.module).__name__,
        parameters=sum(torch.Size(shape).numel() for shape in shapes),
        config=without_secrets(config.resolved()),
        peak_flops=_peak_flops(request, terms),
        restarts=request.restarts,
        plan=request.plan,
        step=engine.global_steps,
        host_bytes=request.host_nbytes,
    )


def _peak_flops(request: EngineRequest, terms: Terms) -> float | None:
    given = request.config.flops_profiler.peak_tflops
    if given is not None:
        return given * _TERA
    dtype = terms.policy.autocast or terms.policy.param or torch.float32
    return peak_flops_of(get_accelerator().product_name(), dtype.itemsize)


def _memory(host_memory: HostMemory, device: torch.device) -> Memory:
    host = host_memory.resident_nbytes()
    if device.type == "cpu":
        return Memory(host, None, None)
    accelerator = get_accelerator()
    return Memory(host, accelerator.memory_allocated(), accelerator.max_memory_allocated())
