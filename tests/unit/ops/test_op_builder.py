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
from deepspeed.ops.native import library
from deepspeed.ops.op_builder import (
    ALL_OPS,
    AsyncIOBuilder,
    CPUAdamBuilder,
    EvoformerAttnBuilder,
    FusedAdamBuilder,
    NativeExtension,
    OpBuilder,
)

REPOSITORY = Path(__file__).parents[3]

OPTIMIZERS = {
    "cpu_adagrad": "DeepSpeedCPUAdagrad",
    "cpu_adam": "DeepSpeedCPUAdam",
    "cpu_lion": "DeepSpeedCPULion",
    "fused_adam": "FusedAdam",
    "fused_lamb": "FusedLamb",
    "fused_lion": "FusedLion",
}
NATIVE = sorted(name for name, op in ALL_OPS.items() if op.FOLDER and op.SERVED_BY)
needs_library = pytest.mark.skipif(library() is None, reason="needs the native library, which this installation lacks")


def test_an_op_is_compatible_exactly_when_it_loads() -> None:
    for name, op in ALL_OPS.items():
        assert name == op.NAME
        if op.is_compatible():
            assert op.load() is importlib.import_module(op.absolute_name())
        else:
            with pytest.raises(UnbuiltFeatureError, match=f"'{name}' is not built yet"):
                op.load()


def test_the_optimizers_are_served_by_their_modules() -> None:
    for name, optimizer in OPTIMIZERS.items():
        assert ALL_OPS[name].is_compatible()
        assert hasattr(ALL_OPS[name].load(), optimizer)
        assert ALL_OPS[name].jit_load() is ALL_OPS[name].load()


def test_every_builder_class_is_in_the_table_and_names_its_variable() -> None:
    classes = {value for value in vars(op_builder).values() if isinstance(value, type)}
    classes -= {OpBuilder, NativeExtension}
    assert classes == {type(op) for op in ALL_OPS.values()}
    assert all(op.BUILD_VAR.startswith("DS_BUILD_") for op in ALL_OPS.values())
    assert len({op.BUILD_VAR for op in ALL_OPS.values()}) == len(ALL_OPS)


@needs_library
@pytest.mark.parametrize("name", NATIVE)
def test_a_native_op_tells_what_was_compiled_for_it(name: str) -> None:
    op, found = ALL_OPS[name], library()
    assert found is not None
    assert op.state() == "native"
    assert f"native code for {found.isa}" in op.reason()
    made = op.builder()
    assert made.path == found.path
    assert made.sources == op.sources() != []
    assert all((REPOSITORY / path).is_file() for path in [*made.sources, *made.include_dirs] if path.endswith(".cpp"))
    assert made.extra_compile_args == op.cxx_args()
    assert "-ffp-contract=off" in op.cxx_args()
    flags = {"avx512": ("-mavx512f", "-D__AVX512__"), "avx2": ("-mavx2", "-D__AVX256__"), "generic": ("", "-D__SCALAR__")}
    assert flags[found.isa][0] in op.cpu_arch()
    assert op.simd_width() == flags[found.isa][1]


@pytest.mark.parametrize("name", NATIVE)
def test_without_the_library_a_native_op_runs_on_its_twin_and_says_why(name: str, without_native_library: str) -> None:
    op = ALL_OPS[name]
    assert op.state() == "twin"
    assert op.is_compatible()
    assert op.load() is importlib.import_module(op.absolute_name())
    assert without_native_library in op.reason()
    assert (op.sources(), op.cxx_args(), op.extra_ldflags(), op.cpu_arch(), op.simd_width()) == (
        [],
        [],
        [],
        "",
        "-D__SCALAR__",
    )
    with pytest.raises(UnbuiltFeatureError, match=rf"{without_native_library}.*{op.BUILD_VAR}=1"):
        op.builder()


def test_an_op_on_torchs_kernels_has_nothing_to_compile() -> None:
    op = FusedAdamBuilder()
    assert op.state() == "torch"
    assert op.sources() == op.include_paths() == op.cxx_args() == op.nvcc_args() == op.libraries_args() == []
    with pytest.raises(UnbuiltFeatureError, match=r"nothing to compile: it is served by deepspeed\.ops\.adam"):
        op.builder()


def test_commands_and_functions_are_looked_for_and_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    op = CPUAdamBuilder()
    with caplog.at_level(logging.WARNING, "DeepSpeed"):
        assert op.command_exists("python3")
        assert op.command_exists(["no-such-command", "python3"])
        assert op.has_function("getpid", ["c"])
        assert not op.has_function("no_such_function", ["c", "no-such-library"])
        assert not caplog.records
        assert not op.command_exists("no-such-command")
        assert not op.has_function("no_such_function", ["c"], verbose=True)
    assert "no-such-command" in caplog.text
    assert "no_such_function" in caplog.text


def test_every_version_of_torch_is_right_for_the_library() -> None:
    CPUAdamBuilder().validate_torch_version({"version": "1.0", "cuda_version": "0.0"})
    CPUAdamBuilder().validate_torch_op_version({"version": "1.0", "cuda_version": "0.0"})


def test_the_reason_is_logged_on_demand(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "DeepSpeed"):
        assert not EvoformerAttnBuilder().is_compatible()
        assert not caplog.records
        assert not EvoformerAttnBuilder().is_compatible(verbose=True)
    assert "evoformer_attn is not available: not built yet" in caplog.text


def test_clients_ask_the_mapping_of_the_package() -> None:
    from deepspeed.ops.aio import AsyncIOBuilder as FromAio

    assert FromAio is AsyncIOBuilder
    assert deepspeed.ops.__compatible_ops__[AsyncIOBuilder.NAME] is AsyncIOBuilder().is_compatible()
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
