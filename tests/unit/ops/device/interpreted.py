"""Runs calls of `deepspeed.ops.device` in Triton's interpreter: `python -m tests.unit.ops.device.interpreted CALLS RESULTS`.

A process of its own, because Triton decides when it is imported whether its functions are interpreted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from deepspeed.ops import device
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import FusedLion

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def optimizer_steps(kind: str, params: list[Tensor], grads: list[list[Tensor]], **numbers: Any) -> list[dict[str, Tensor]]:
    """Step an optimizer class with the kernels, as on a device, once for each list of gradients; its states at the end."""
    parameters = [torch.nn.Parameter(each.clone()) for each in params]
    optimizer = {"lion": FusedLion, "lamb": FusedLamb}[kind](parameters, **numbers)
    on_device = mock.patch.object(device, "can_run", return_value=True)
    with on_device, mock.patch.object(type(optimizer), "_runs_on_host", return_value=False):
        for of_step in grads:
            for parameter, grad in zip(parameters, of_step, strict=True):
                parameter.grad = grad.clone()
            optimizer.step()
    return [{**optimizer.state[each], "param": each.detach()} for each in parameters]


def main(calls_file: Path, results_file: Path) -> None:
    """Make each call; write its result and its arguments as it left them."""
    calls: list[Call] = torch.load(calls_file, weights_only=False)
    functions = {"optimizer_steps": optimizer_steps, **{name: getattr(device, name) for name in device.__all__}}
    results = [(functions[name](*args, **kwargs), args) for name, args, kwargs in calls]
    torch.save(results, results_file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
