from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from deepspeed.accelerator import get_accelerator, is_current_accelerator_supported, set_accelerator
from deepspeed.accelerator.cpu import CpuAccelerator
from deepspeed.accelerator.select import SUPPORTED_ACCELERATORS, choose
from deepspeed.errors import AcceleratorError, ArgumentError


def _only(*available: str) -> Any:
    """Build stand-ins of which only these are there; the CPU is real."""

    class Device(CpuAccelerator):
        def is_available(self) -> bool:
            return self._name in (*available, "cpu")

    def build(name: str, environ: Mapping[str, str]) -> CpuAccelerator:
        device = Device(environ)
        device._name = name
        return device

    return build


def test_the_first_available_device_is_chosen_and_the_cpu_at_last() -> None:
    assert choose({}, _only("cuda")).device_name() == "cuda"
    assert choose({}, _only("cuda", "npu")).device_name() == "npu"
    assert choose({}, _only()).device_name() == "cpu"
    assert choose({"DS_ACCELERATOR": " "}, _only()).device_name() == "cpu"


@pytest.mark.parametrize("name", SUPPORTED_ACCELERATORS)
def test_the_variable_overrides_the_probe(name: str) -> None:
    assert choose({"DS_ACCELERATOR": name.upper()}, _only(*SUPPORTED_ACCELERATORS)).device_name() == name


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(AcceleratorError, match=r"DS_ACCELERATOR='gpu' is unknown.*xpu, npu, sdaa, mps, hpu, mlu, cuda, cpu"):
        choose({"DS_ACCELERATOR": "gpu"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_device_that_is_not_there_is_refused_with_the_cure() -> None:
    with pytest.raises(AcceleratorError, match=r"finds no cuda device here.*unset DS_ACCELERATOR"):
        choose({"DS_ACCELERATOR": "cuda"})


def test_a_plugin_that_is_not_there_is_named() -> None:
    with pytest.raises(AcceleratorError, match="the package 'torch_mlu'"):
        choose({"DS_ACCELERATOR": "mlu"})


def test_the_accelerator_is_chosen_once_and_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    first = get_accelerator()
    assert get_accelerator() is first
    assert is_current_accelerator_supported()
    other = CpuAccelerator()
    other._name = "mine"
    set_accelerator(other)
    assert get_accelerator() is other
    assert not is_current_accelerator_supported()
    set_accelerator(None)
    assert get_accelerator() is not other


def test_only_an_accelerator_can_be_set() -> None:
    with pytest.raises(ArgumentError, match="got a str"):
        set_accelerator("cuda")  # type: ignore[arg-type]


def test_the_cpu_counts_local_ranks_that_are_set_after_it_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    accelerator = get_accelerator()
    assert accelerator.device_count() == 1
    monkeypatch.setenv("LOCAL_SIZE", "3")
    assert accelerator.device_count() == 3


def test_the_old_module_path_is_the_same_function() -> None:
    from deepspeed.accelerator import real_accelerator

    assert real_accelerator.get_accelerator is get_accelerator


def test_importing_the_room_chooses_no_accelerator() -> None:
    code = (
        "import deepspeed.accelerator.select as s, torch; assert s._current is None; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
