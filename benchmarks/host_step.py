"""How near to the speed of memory is an optimizer step on the CPU, and how does it compare with torch's fused kernels?

A step is bound by memory: Adam in fp32 reads 16 and writes 12 bytes per element. `triad` adds a multiple of one array to
another in place, nothing else: 8 bytes read and 4 written per element, the same kind of traffic. Its bytes per second are
the ceiling, so the two are compared in milliseconds per GB moved.

- `adam`, `adagrad`, `lion`: one fp32 tensor, `step()`. torch has no Lion; its SGD with momentum moves the same bytes.
- `mixed`: bf16 gradient in, bf16 weights out. Ours does that in the pass; torch's fused AdamW needs a copy before and after.
- `small`: 2,048 tensors of 1,024 elements, where what a tensor costs in Python and in the call counts.
- `load`: finding and loading the library, as at the first step of a process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.harness.cases import OURS, Case, Goal, Measured

_TORCH = "torch fused"
_TRIAD = "triad"
_MOVED_BYTES = {"adam": 28, "adagrad": 20, "lion": 20, _TRIAD: 12}  # per fp32 element
_WARM_UP, _STEPS = 2, 8


def _large(kind: str, millions: int, threads: int) -> Case:
    return Case(
        f"host_step {kind} {millions}M threads {threads}",
        benchmark=__name__.rpartition(".")[2],
        contenders=(OURS, _TORCH, _TRIAD),
        figures=("step_ms", "ms_per_gb"),
        of=_TORCH,
        pairs=3,
        goals=(Goal("step_ms", 1.0, of=_TORCH), Goal("ms_per_gb", 1 / 0.9, of=_TRIAD)),
        arguments={"kind": kind, "numel": millions << 20, "threads": threads},
    )


def _against_torch(title: str, at_most: float, threads: int, **arguments: Any) -> Case:
    return Case(
        f"host_step {title} threads {threads}",
        benchmark=__name__.rpartition(".")[2],
        contenders=(OURS, _TORCH),
        figures=("step_ms",),
        of=_TORCH,
        pairs=3,
        goals=(Goal("step_ms", at_most, of=_TORCH),),
        arguments={"threads": threads, **arguments},
    )


CASES = (
    *(_large("adam", millions, threads) for millions in (64, 192) for threads in (1, 2)),
    *(_large(kind, 64, threads) for kind in ("adagrad", "lion") for threads in (1, 2)),
    *(_against_torch("mixed 64M", 1 / 1.5, threads, kind="mixed", numel=64 << 20) for threads in (1, 2)),
    *(
        _against_torch(f"small {kind}", 1.0, threads, kind=kind, numel=1024, tensors=2048)
        for kind in ("adam", "adagrad", "lion")
        for threads in (1, 2)
    ),
    Case(
        "host_step load",
        benchmark=__name__.rpartition(".")[2],
        contenders=(OURS,),
        figures=("load_ms",),
        of=OURS,
        pairs=3,
        goals=(Goal("load_ms", 50.0),),
        arguments={"kind": "load", "threads": 1},
    ),
)


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    torch.set_num_threads(arguments["threads"])
    kind = arguments["kind"]
    if kind == "load":
        return Measured({"load_ms": _load() * 1e3})
    if contender == _TRIAD:
        update = _triad(arguments["numel"])
    elif kind == "mixed":
        update = _mixed(contender, arguments["numel"])
    else:
        update = _step(contender, kind, arguments["numel"], arguments.get("tensors", 1))
    seconds = []
    for _ in range(_WARM_UP + _STEPS):
        began = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - began)
    step_ms = statistics.median(seconds[_WARM_UP:]) * 1e3
    moved_gb = _MOVED_BYTES.get(_TRIAD if contender == _TRIAD else kind, 0) * arguments["numel"] / 1e9
    return Measured({"step_ms": step_ms, "ms_per_gb": step_ms / moved_gb if moved_gb else 0.0})


def _load() -> float:
    import deepspeed.ops.native  # the package's own import is import_time's business

    began = time.perf_counter()
    assert deepspeed.ops.native.library() is not None  # else there is nothing to measure
    return time.perf_counter() - began


def _triad(numel: int) -> Callable[[], object]:
    into, of = torch.ones(numel), torch.ones(numel)
    return lambda: into.add_(of, alpha=1e-6)


def _step(contender: str, kind: str, numel: int, tensors: int) -> Callable[[], object]:
    params = [torch.nn.Parameter(torch.ones(numel)) for _ in range(tensors)]
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    if contender == _TORCH:
        return _torchs(kind, params).step
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion

    classes: dict[str, Any] = {"adam": DeepSpeedCPUAdam, "adagrad": DeepSpeedCPUAdagrad, "lion": DeepSpeedCPULion}
    made = classes[kind](params, weight_decay=0.0 if kind == "adagrad" else 0.01)
    step: Callable[[], object] = made.step
    return step


def _torchs(kind: str, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.AdamW(params, fused=True)
    if kind == "adagrad":
        return torch.optim.Adagrad(params, fused=True)
    return torch.optim.SGD(params, momentum=0.9, weight_decay=0.01, fused=True)


def _mixed(contender: str, numel: int) -> Callable[[], object]:
    param = torch.nn.Parameter(torch.ones(numel))
    grad, values = torch.full((numel,), 1e-3, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.bfloat16)
    if contender == _TORCH:
        wide = param.grad = torch.empty_like(param)
        optimizer = torch.optim.AdamW([param], fused=True)

        def copy_step_copy() -> None:
            wide.copy_(grad)
            optimizer.step()
            values.copy_(param.detach())

        return copy_step_copy
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.host_step import Update

    ours = DeepSpeedCPUAdam([param], weight_decay=0.01)
    return lambda: ours.step_in_one_pass([Update(param, param.detach(), grad, values)], 1.0)
