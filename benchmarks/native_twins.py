"""What does an operator lose where the native library is absent?

`ours` is the operator as it is; `twin` the same process with `DS_NATIVE=0`, on torch's calls. 16M elements in host memory,
on as many threads as torch has. `ds_report` and docs/guide/native-library.md quote the ratios of this.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.harness.cases import OURS, Case, Goal, Measured

_TWIN = "twin"
_NUMEL = 1 << 24
_OPERATORS = ("cpu_adam", "cpu_adagrad", "cpu_lion", "fused_lamb", "quantizer", "copy")

CASES = tuple(
    Case(
        f"native_twins {operator}",
        benchmark=__name__.rpartition(".")[2],
        contenders=(OURS, _TWIN),
        figures=("call_ms",),
        of=_TWIN,
        goals=(Goal("call_ms", at_most=1.0, of=_TWIN),),
        pairs=3,
        arguments={"operator": operator},
    )
    for operator in _OPERATORS
)


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    if contender == _TWIN:
        os.environ["DS_NATIVE"] = "0"  # before the library is asked for
    call = _call(arguments["operator"])
    seconds = []
    for _ in range(8):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return Measured({"call_ms": statistics.median(seconds[2:]) * 1e3})  # the first two touch the memory


def _call(operator: str) -> Callable[[], object]:
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.host_copy import copy_host
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion
    from deepspeed.ops.quantizer import dequantize_blocks, quantize_blocks

    values = torch.randn(_NUMEL)
    if operator == "copy":
        place = torch.zeros_like(values)
        return lambda: copy_host([(place, values)])
    if operator == "quantizer":
        return lambda: dequantize_blocks(quantize_blocks(values, 8, 2048), 8, 2048, _NUMEL)
    classes: dict[str, Any] = {
        "cpu_adam": DeepSpeedCPUAdam,
        "cpu_adagrad": DeepSpeedCPUAdagrad,
        "cpu_lion": DeepSpeedCPULion,
        "fused_lamb": FusedLamb,
    }
    parameter = torch.nn.Parameter(values)
    parameter.grad = torch.randn(_NUMEL)
    step: Callable[[], object] = classes[operator]([parameter], lr=1e-3).step
    return step
