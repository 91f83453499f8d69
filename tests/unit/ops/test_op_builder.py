from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import deepspeed.ops
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import UnbuiltFeatureError
from deepspeed.ops import op_builder
from deepspeed.ops.op_builder import ALL_OPS, AsyncIOBuilder, CPUAdamBuilder, OpBuilder

OPTIMIZERS = {
    "cpu_adagrad": "DeepSpeedCPUAdagrad",
    "cpu_adam": "DeepSpeedCPUAdam",
    "cpu_lion": "DeepSpeedCPULion",
    "fused_adam": "FusedAdam",
    "fused_lamb": "FusedLamb",
    "fused_lion": "FusedLion",
}


def test_an_op_is_compatible_exactly_when_it_loads() -> None:
    for name, op in ALL_OPS.items():
        assert name == op.NAME
        if op.is_compatible():
            assert op.load() is importlib.import_module(op.absolute_name())
        else:
            with pytest.raises(UnbuiltFeatureError, match=f"'{name}' is not built yet"):
                op.load()


def test_the_optimizers_are_what_this_version_has() -> None:
    assert {name for name, op in ALL_OPS.items() if op.is_compatible()} == set(OPTIMIZERS)
    for name, optimizer in OPTIMIZERS.items():
        assert hasattr(ALL_OPS[name].load(), optimizer)


def test_every_builder_class_is_in_the_table_and_names_its_variable() -> None:
    classes = {value for value in vars(op_builder).values() if isinstance(value, type) and value is not OpBuilder}
    assert classes == {type(op) for op in ALL_OPS.values()}
    assert all(op.BUILD_VAR.startswith("DS_BUILD_") for op in ALL_OPS.values())
    assert len({op.BUILD_VAR for op in ALL_OPS.values()}) == len(ALL_OPS)


def test_there_is_nothing_native_to_build_and_it_says_so() -> None:
    assert CPUAdamBuilder().sources() == []
    with pytest.raises(UnbuiltFeatureError, match="no native sources"):
        CPUAdamBuilder().builder()


def test_the_reason_is_logged_on_demand(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "DeepSpeed"):
        assert not AsyncIOBuilder().is_compatible()
        assert not caplog.records
        assert not AsyncIOBuilder().is_compatible(verbose=True)
    assert "async_io is not available: not built yet" in caplog.text


def test_clients_ask_the_mapping_of_the_package() -> None:
    from deepspeed.ops.aio import AsyncIOBuilder as FromAio

    assert FromAio is AsyncIOBuilder
    assert deepspeed.ops.__compatible_ops__[AsyncIOBuilder.NAME] is False
    assert deepspeed.ops.__compatible_ops__["fused_adam"] is True
    assert set(deepspeed.ops.__compatible_ops__) == set(ALL_OPS)


def test_the_accelerator_makes_builders_by_class_name() -> None:
    assert isinstance(get_accelerator().create_op_builder("CPUAdamBuilder"), CPUAdamBuilder)


def test_asking_what_there_is_does_not_import_torch() -> None:
    code = "import sys, deepspeed.ops; deepspeed.ops.__compatible_ops__; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
