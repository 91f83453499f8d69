"""What a process holds beside a module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.accelerator.host_memory import HostMemory
from deepspeed.engine.log_start import host_nbytes_beside


def test_a_modules_tensors_are_left_out_each_storage_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    module[1].weight = module[0].weight
    module.register_buffer("counts", torch.zeros(8, dtype=torch.float16))
    module.register_parameter("elsewhere", nn.Parameter(torch.empty(1000, device="meta")))
    monkeypatch.setattr(HostMemory, "resident_nbytes", lambda _: 10_000)
    assert host_nbytes_beside(module) == 10_000 - 400 - 16


def test_shards_of_a_parameter_that_is_released_count_as_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    param = nn.Parameter(torch.empty(0))
    param.ds_tensor = torch.zeros(25)  # type: ignore[attr-defined]
    module = nn.Module()
    module.register_parameter("weight", param)
    monkeypatch.setattr(HostMemory, "resident_nbytes", lambda _: 10_000)
    assert host_nbytes_beside(module) == 10_000 - 100


def test_weights_that_are_not_in_memory_yet_leave_nothing_below_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "resident_nbytes", lambda _: 100)
    assert host_nbytes_beside(nn.Linear(10, 10)) == 0
