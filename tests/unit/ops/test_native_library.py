from __future__ import annotations

import ctypes
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.ops.native import ABI_VERSION, BuildRecord, NativeLibrary, absence, build_record, library

REPOSITORY = Path(__file__).parents[3]
needs_library = pytest.mark.skipif(library() is None, reason="needs the native library, which this installation lacks")
module = importlib.import_module("deepspeed.ops.native.library")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Whether there is a library is asked anew, in this test and after it."""
    monkeypatch.setattr(module, "_load", module._load.__wrapped__)
    monkeypatch.delenv("DS_NATIVE", raising=False)
    return monkeypatch


def test_there_is_a_library_or_a_reason() -> None:
    assert (library() is None) != (absence() is None)


@needs_library
def test_an_operator_that_was_left_out_is_absent_and_the_rest_is_not(fresh: pytest.MonkeyPatch) -> None:
    found = library()
    assert found is not None
    fresh.setattr(module, "_load", lambda: (found, None))
    assert library("cpu_adam") is found
    assert absence("cpu_adam") is None
    fresh.setattr(found, "operators", found.operators - {"cpu_adam"})
    assert library("cpu_adam") is None
    assert absence("cpu_adam") == "the native library was built without cpu_adam"
    assert library() is library("quantizer") is found


def test_it_can_be_turned_off(without_native_library: str) -> None:
    assert library() is library("cpu_adam") is None
    assert absence() == absence("cpu_adam") == without_native_library


def test_a_library_of_another_version_is_refused_with_the_cure(fresh: pytest.MonkeyPatch) -> None:
    if build_record().absence:
        pytest.skip("needs the native library, which this installation lacks")
    fresh.setattr(module, "ABI_VERSION", ABI_VERSION + 1)
    assert library() is None
    why = absence()
    assert why is not None
    assert f"interface {ABI_VERSION}, this package calls interface {ABI_VERSION + 1}: install it again" in why


def test_a_file_that_is_no_library_is_settled_and_the_twins_serve(
    fresh: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "_deepspeed_native.so"
    broken.write_bytes(b"not a library")
    fresh.setattr(
        module.importlib.util, "find_spec", lambda _name: importlib.machinery.ModuleSpec("x", None, origin=str(broken))
    )
    fresh.setattr(module, "_logger", module.get_logger("DeepSpeed"))
    assert library() is None
    assert str(broken) in str(absence())


def test_sources_that_were_never_installed_and_a_removed_file_are_told(
    monkeypatch: pytest.MonkeyPatch, fresh: pytest.MonkeyPatch
) -> None:
    record = importlib.import_module("deepspeed.ops.native.record")
    monkeypatch.setattr(record, "_MODULE", "deepspeed.ops.native._no_such_record")
    assert "without being installed" in build_record.__wrapped__().absence
    monkeypatch.setattr(module, "build_record", lambda: BuildRecord("", (), (), ()))
    fresh.setattr(module.importlib.util, "find_spec", lambda _name: None)
    assert absence() == "its file was removed after this package was installed"


@needs_library
def test_the_record_and_the_library_agree() -> None:
    found, record = library(), build_record()
    assert found is not None
    assert record.absence == ""
    assert set(record.operators) == set(found.operators)
    assert "csrc/core/isa.cpp" in record.sources


@needs_library
def test_the_library_needs_neither_torch_nor_python() -> None:
    found = library()
    assert found is not None
    code = (
        "import ctypes, sys\n"
        f"native = ctypes.CDLL({str(found.path)!r})\n"
        "native.ds_isa.restype = ctypes.c_char_p\n"
        "libraries = {line.split('/')[-1].strip() for line in open('/proc/self/maps') if '.so' in line}\n"
        "print(native.ds_abi_version(), native.ds_isa().decode(), 'torch' in sys.modules,"
        " any('torch' in name or 'stdc++' in name for name in libraries))\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(ABI_VERSION), found.isa, "False", "False"]


@needs_library
def test_a_process_that_is_killed_while_it_loads_leaves_nothing_that_stops_the_next() -> None:
    found = library()
    assert found is not None
    before = {path: path.stat().st_mtime_ns for path in found.path.parent.iterdir()}
    code = "import os, signal; from deepspeed.ops.native import library; library(); os.kill(os.getpid(), signal.SIGKILL)"
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], env=environ, timeout=60, check=False)
        assert done.returncode == -signal.SIGKILL
    assert {path: path.stat().st_mtime_ns for path in found.path.parent.iterdir()} == before
    assert NativeLibrary(found.path).isa == found.isa


@needs_library
def test_every_instruction_set_that_this_processor_lacks_is_refused() -> None:
    found = library()
    assert found is not None
    choose = found.function("ds_set_isa", ctypes.c_int32, ctypes.c_char_p)
    assert choose(b"no-such-set") < 0
    assert found._text("ds_isa") == found.isa
    assert choose(b"generic") == 0
    assert found._text("ds_isa") == "generic"
    assert choose(found.isa.encode()) == 0
