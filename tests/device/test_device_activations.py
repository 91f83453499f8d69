"""Checkpointed parts on an accelerator: numbers of a plain call, and memory that is really given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed import checkpointing
from deepspeed.accelerator import get_accelerator

pytestmark = pytest.mark.skipif(get_accelerator().device_name() == "cpu", reason="there is no accelerator here")

ROWS, WIDTH, LAYERS = 1 << 14, 256, 8  # an input has 16 MiB
INPUT = ROWS * WIDTH * 4


def _run(run: Any) -> tuple[list[Tensor], int]:
    """Gradients, and the device's bytes taken between forward and backward."""
    device = get_accelerator().current_device_name()
    torch.manual_seed(1)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(LAYERS))
    layers.to(device)
    start = torch.rand(ROWS, WIDTH, device=device, requires_grad=True)
    get_accelerator().synchronize()
    before = get_accelerator().memory_allocated()
    x = start * 1
    for layer in layers:
        x = run(layer, x)
    loss = x.sum()
    del x
    get_accelerator().synchronize()
    kept_nbytes = get_accelerator().memory_allocated() - before
    loss.backward()
    return [tensor.grad for tensor in (start, *layers.parameters()) if tensor.grad is not None], kept_nbytes


@pytest.mark.parametrize(("device", "inputs"), [("none", LAYERS), ("cpu", 1), ("nvme", 1)])
def test_numbers_are_those_of_a_plain_call_and_inputs_leave_the_device(device: str, inputs: int, tmp_path: Path) -> None:
    plain, _ = _run(lambda layer, x: layer(x))
    offload = {"device": device, "nvme_path": str(tmp_path) if device == "nvme" else None}
    checkpointing.configure(None, {"train_batch_size": 1, "activation_checkpointing": {"offload": offload}})
    for _ in range(2):
        ours, kept_nbytes = _run(checkpointing.checkpoint)
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
        assert inputs * INPUT <= kept_nbytes <= (inputs + 1) * INPUT
