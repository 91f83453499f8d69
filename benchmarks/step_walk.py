"""What does the update alone cost, and which sub-group is best?

This is where `SUB_GROUP_NUMEL` of `deepspeed/zero/master.py` comes from. One rank, the parameters of `train_step`'s model
in flat buffers, AdamW. `ours` is the walk as it is built: unscale, step, write the model's weights back, zero the
gradients, in one pass over sub-groups; `sub-group N` the same with N elements per sub-group. `fused` is torch's fused
AdamW on the same full-precision tensors and nothing else: no unscaling, no writing back, no zeroing. So `fused` is a
floor, not an equal.

Cases: fp32 with factor 1, where no gradient needs converting and one call of the kernel covers everything; fp32 with a
factor, as accumulation or clipping give; bf16, where gradients are converted and weights rounded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.harness.cases import OURS, Case, Measured
from benchmarks.harness.models import build_model
from benchmarks.harness.trainers import LEARNING_RATE, WEIGHT_DECAY

_FUSED = "fused"
_SIZES = tuple(f"sub-group {1 << power}" for power in (17, 19, 21, 25))

CASES = tuple(
    Case(
        f"step_walk {dtype} factor {factor:g}",
        benchmark=__name__.rpartition(".")[2],
        contenders=(OURS, _FUSED, *sizes),
        figures=("update_ms",),
        of=_FUSED,
        pairs=3,
        side_pairs=1,
        arguments={"dtype": dtype, "factor": factor},
    )
    for dtype, factor, sizes in (("fp32", 1.0, ()), ("fp32", 0.25, _SIZES), ("bf16", 1.0, _SIZES))
)


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    update = _update(contender, arguments)
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - began)
    return Measured({"update_ms": statistics.median(seconds[2:]) * 1e3})  # the first two touch the memory


def _update(contender: str, arguments: Mapping[str, Any]) -> Callable[[], object]:
    from deepspeed.comm.algorithms import LocalGatherer, flat_all_reducer
    from deepspeed.sharding import FlatLayout
    from deepspeed.topology.mesh import AxisGroup
    from deepspeed.zero import master
    from deepspeed.zero.flat import FlatGroup, Kind, NamedParameter
    from deepspeed.zero.gradients import ViewGradients

    if contender not in (OURS, _FUSED):
        master.SUB_GROUP_NUMEL["cpu"] = int(contender.split()[1])
    model = build_model({})
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments["dtype"]]
    members = [NamedParameter(name, param, order) for order, (name, param) in enumerate(model.named_parameters())]
    kind = Kind(group_index=0, param_dtype=dtype, master_dtype=torch.float32)
    numels = [member.param.numel() for member in members]
    layout = FlatLayout.plan(numels, bucket_numel=sum(numels), alignment=kind.alignment)
    flat = FlatGroup(members, kind, layout, LocalGatherer(layout.numel, dtype, torch.device("cpu")), AxisGroup((0,), 0))
    if contender == _FUSED:
        whole = torch.nn.Parameter(flat.own_master(0, layout.numel))
        whole.grad = torch.full_like(whole, 1e-3)
        optimizer.param_groups[0]["params"] = [whole]
        return optimizer.step
    gradients = flat_all_reducer(layout.numel, dtype)
    flat.attach_gradients(ViewGradients(flat, gradients))
    gradients.buffer.fill_(1e-3)  # the walk leaves zeros behind; the time does not depend on the values
    weights = master.MasterWeights([flat], optimizer, is_elementwise=True)
    return lambda: weights.step(arguments["factor"])
