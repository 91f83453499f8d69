"""Building, installing and using the package where there is a compiler, where there is none, and where one fails.

Nothing is fetched: the new environments see the packages of this one (torch and the build's own), and the tools are its.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deepspeed.launcher.processes import adopting_orphans, descendants, end_processes, signal_all

REPOSITORY = Path(__file__).parents[2]
QUICK = "-DDS_NATIVE_ISAS=generic -DCMAKE_BUILD_TYPE=Debug"
LITTLE = {"DS_BUILD_OPS": "0", "DS_BUILD_QUANTIZER": "1"}
SITE = Path(sysconfig.get_paths()["purelib"])
TRAIN = """
import torch, deepspeed
from deepspeed.ops.native import library
config = {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2},
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
engine, *_ = deepspeed.initialize(model=model, config=config)
inputs = torch.randn(8, 16).bfloat16()
for _ in range(5):
    loss = (engine(inputs) - inputs).float().square().mean()
    engine.backward(loss)
    engine.step()
print(deepspeed.__file__, library() is not None, loss.item(), model.weight.double().sum().item())
"""

needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None, reason="builds the native library, which needs a C++ compiler"
)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, made from a copy of the files that the repository has."""
    folder = tmp_path_factory.mktemp("sdist")
    source = folder / "source"
    for name in ("csrc", "deepspeed", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        of = REPOSITORY / name
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(of, source / name, ignore=ignore) if of.is_dir() else shutil.copy(of, source / name)
    code = "from scikit_build_core.build import build_sdist; print(build_sdist('..'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=True, timeout=60)
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A folder for PATH that has no compiler, CMake or anything else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def _environ(**settings: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DS_", "CXX", "CMAKE", "PYTHONPATH"))}
    return {
        **kept,
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    } | settings


def _with_tools() -> str:
    """PATH with the CMake and ninja of this environment before the system's."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def _wheel(sdist: Path, folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """`pip wheel` without build isolation, which would fetch the build's own packages."""
    argv = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", str(folder), str(sdist)]
    environ = _environ(PATH=_with_tools()) | settings
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=240, check=False)


def _members(folder: Path) -> tuple[Path, set[str]]:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return wheel, set(archive.namelist())


def _record(wheel: Path) -> dict[str, object]:
    """What the build wrote down."""
    with zipfile.ZipFile(wheel) as archive:
        found: dict[str, object] = {}
        exec(archive.read("deepspeed/ops/native/_build_record.py"), found)  # our own file, plain values
        return found


@pytest.fixture
def fresh_venv(tmp_path: Path) -> Iterator[Path]:
    """The interpreter of a new environment, which sees this one's packages but not its editable `deepspeed`."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=60)
    (site,) = folder.glob("lib/python3.*/site-packages")
    (site / "_of_the_tests.pth").write_text(f"{SITE}\n")  # .pth files in there are not read: no import hook of ours
    yield folder / "bin" / "python"
    shutil.rmtree(folder)


def _install(python: Path, what: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    argv = [str(python), "-m", "pip", "install", "--no-deps", "--no-build-isolation", str(what)]
    return subprocess.run(argv, env=_environ() | settings, capture_output=True, text=True, timeout=240, check=False)


def _train(python: Path, folder: Path, **settings: str) -> tuple[str, str, str, str]:
    done = subprocess.run(
        [str(python), "-c", TRAIN],
        cwd=folder,
        env=_environ() | settings,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    path, is_native, loss, weights = done.stdout.splitlines()[-1].split()
    return path, is_native, loss, weights


def test_an_sdist_holds_the_sources_of_the_library_and_no_build(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"csrc/native.h", "csrc/CMakeLists.txt", "csrc/package/CMakeLists.txt", "pyproject.toml", "LICENSE"} <= names
    assert not [name for name in names if name.endswith((".so", ".o")) or name.startswith(("tests/", "build/"))]


@needs_compiler
def test_a_wheel_carries_the_library_for_every_python_and_torch(sdist: Path, tmp_path: Path, fresh_venv: Path) -> None:
    done = _wheel(sdist, tmp_path / "out", DS_BUILD_OPS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    wheel, names = _members(tmp_path / "out")
    assert re.fullmatch(r"deepspeed-.*-py3-none-linux_\w+\.whl", wheel.name)
    assert "deepspeed/ops/native/_deepspeed_native.so" in names
    assert not [name for name in names if name.startswith(("csrc/", "tests/"))]
    assert _record(wheel)["ABSENCE"] == ""

    installed = _install(fresh_venv, wheel, PATH=str(tmp_path / "nothing"))
    assert installed.returncode == 0, installed.stdout + installed.stderr
    path, is_native, *with_library = _train(fresh_venv, tmp_path, PATH=str(tmp_path / "nothing"))
    assert path.startswith(str(fresh_venv.parents[1]))
    assert is_native == "True"
    *_, is_native, loss, weights = _train(fresh_venv, tmp_path, DS_NATIVE="0")
    assert [is_native, loss, weights] == ["False", *with_library]  # the twins give the same numbers


def test_an_sdist_installs_and_trains_where_there_is_no_compiler(
    sdist: Path, tmp_path: Path, fresh_venv: Path, bare_path: Path
) -> None:
    for name in ("cmake", "ninja"):  # which pip fetches for a build, when it may
        (bare_path / name).symlink_to(Path(sys.executable).parent / name)
    settings = {"PATH": str(bare_path), "CXX": str(bare_path / "c++")}  # CMake looks in /usr/bin by itself
    done = _install(fresh_venv, sdist, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    path, is_native, *_ = _train(fresh_venv, tmp_path, PATH=str(bare_path))
    assert path.startswith(str(fresh_venv.parents[1]))
    assert is_native == "False"
    argv = [str(fresh_venv.parent / "ds_report"), "--json"]
    told = json.loads(subprocess.run(argv, env=_environ(PATH=str(bare_path)), capture_output=True, check=True).stdout)
    assert told["native_path"] == "absent"
    assert "there was no C++ compiler when" in told["native_absence"]
    assert told["ops"]["cpu_adam"]["state"] == "twin"
    assert "DS_BUILD_OPS=1" in told["warnings"][-1]


def _broken_compiler(folder: Path) -> Path:
    """A compiler that compiles what CMake tries, and fails on ours with an error of its own, then with another."""
    script = folder / "broken-c++"
    script.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '  *parallel.cpp*) echo "parallel.cpp:7:3: error: the first error" >&2; echo "    7 |   this line" >&2; exit 1;;\n'
        '  *isa.cpp*|*table.cpp*|*build.cpp*) while [ -e "$HOLD" ]; do sleep 0.05; done;;\n'
        "esac\n"
        f'exec {shutil.which("c++")} "$@"\n'
    )
    script.chmod(0o755)
    return script


@needs_compiler
@pytest.mark.parametrize("asked", [{"DS_BUILD_OPS": "1"}, {"DS_BUILD_CPU_ADAM": "1"}])
def test_a_failed_build_that_was_asked_for_shows_the_compilers_own_first_error(
    sdist: Path, tmp_path: Path, asked: dict[str, str]
) -> None:
    done = _wheel(sdist, tmp_path / "out", CXX=str(_broken_compiler(tmp_path)), CMAKE_ARGS=QUICK, **asked)
    assert done.returncode != 0
    told = done.stdout + done.stderr
    ((variable, value),) = asked.items()
    end = told[told.index(f"{variable}={value} asks for the native library of deepspeed") :]
    assert "parallel.cpp:7:3: error: the first error" in end
    assert "this line" in end
    assert f"leave {variable}={value} out" in re.sub(r"\s+", " ", end)
    assert not list((tmp_path / "out").glob("*.whl"))


@needs_compiler
def test_a_failed_build_that_nobody_asked_for_is_written_down_and_the_package_installs(sdist: Path, tmp_path: Path) -> None:
    done = _wheel(sdist, tmp_path / "out", CXX=str(_broken_compiler(tmp_path)), CMAKE_ARGS=QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    wheel, names = _members(tmp_path / "out")
    assert "deepspeed/ops/native/_deepspeed_native.so" not in names
    record = _record(wheel)
    assert "it did not compile" in str(record["ABSENCE"])
    assert "parallel.cpp:7:3: error: the first error" in str(record["ABSENCE"])
    assert record["OPERATORS"] == ()


def _cmake(folder: Path, compiler: Path, **settings: str) -> dict[str, object]:
    """The record of a build by CMake alone, with generic and AVX-512 kernels."""
    tools, build = Path(sys.executable).parent, folder / "build"
    first = [str(tools / "cmake"), "-S", str(REPOSITORY / "csrc/package"), "-B", str(build), "-G", "Ninja"]
    environ = _environ(PATH=_with_tools(), CXX=str(compiler), **settings)
    for argv in (
        [*first, "-DDS_NATIVE_ISAS=generic,avx512", "-DCMAKE_BUILD_TYPE=Debug"],
        [str(tools / "cmake"), "--build", str(build)],
    ):
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, object] = {}
    exec((build / "_build_record.py").read_text(), found)  # our own file, plain values
    return found


def test_a_compiler_that_is_there_and_does_not_work_is_not_called_absent(tmp_path: Path) -> None:
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\necho \"c++: fatal error: cannot execute 'cc1plus'\" >&2\nexit 1\n")
    script.chmod(0o755)
    told = str(_cmake(tmp_path, script)["ABSENCE"])
    assert "it did not compile" in told
    assert "c++: fatal error: cannot execute 'cc1plus'" in told


@needs_compiler
def test_an_instruction_set_that_the_compiler_lacks_costs_only_its_own_kernels(tmp_path: Path) -> None:
    script = tmp_path / "c++"
    refusal = 'case "$*" in *-mavx512*) echo "error: unrecognized option" >&2; exit 1;; esac'
    script.write_text(f'#!/bin/sh\n{refusal}\nexec {shutil.which("c++")} "$@"\n')
    script.chmod(0o755)
    record = _cmake(tmp_path, script, **LITTLE)
    assert record["ABSENCE"] == ""
    assert "avx512: kernels for it are left out" in str(record["NOTES"])
    assert (tmp_path / "build/native/_deepspeed_native.so").is_file()


@needs_compiler
def test_one_operator_can_be_built_alone(sdist: Path, tmp_path: Path) -> None:
    done = _wheel(sdist, tmp_path / "out", DS_BUILD_CPUADAM="1", CMAKE_ARGS=QUICK, **LITTLE)
    assert done.returncode == 0, done.stdout + done.stderr
    wheel, names = _members(tmp_path / "out")
    assert "deepspeed/ops/native/_deepspeed_native.so" in names
    record = _record(wheel)
    assert record["OPERATORS"] == ("quantizer",)
    assert "DS_BUILD_CPUADAM=1" in str(record["NOTES"])  # there is none of that name
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract("deepspeed/ops/native/_deepspeed_native.so", tmp_path)
    code = (
        f"import ctypes; native = ctypes.CDLL({library!r}); native.ds_operators.restype = ctypes.c_char_p\n"
        "print(native.ds_operators().decode(), hasattr(native, 'ds_quantize'), hasattr(native, 'ds_io_open'))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["quantizer", "True", "False"]


def test_the_library_can_be_left_out(sdist: Path, tmp_path: Path) -> None:
    done = _wheel(sdist, tmp_path / "out", DS_BUILD_OPS="0")
    assert done.returncode == 0, done.stdout + done.stderr
    wheel, names = _members(tmp_path / "out")
    assert "deepspeed/ops/native/_deepspeed_native.so" not in names
    assert "left out by DS_BUILD_OPS=0" in str(_record(wheel)["ABSENCE"])


def test_an_operator_that_this_version_lacks_cannot_be_asked_for(sdist: Path, tmp_path: Path) -> None:
    done = _wheel(sdist, tmp_path / "out", DS_BUILD_SPARSE_ATTN="1")
    assert done.returncode != 0
    assert "this version of deepspeed has no sparse_attn" in re.sub(r"\s+", " ", done.stdout + done.stderr)


@needs_compiler
def test_a_build_that_is_killed_does_not_stop_the_next(sdist: Path, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    script = _broken_compiler(tmp_path)
    script.write_text(script.read_text().replace("*parallel.cpp*)", "*no-such-file*)"))
    argv = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path / "out"),
        str(sdist),
    ]
    environ = _environ(PATH=_with_tools(), CXX=str(script), HOLD=str(hold), TMPDIR=str(tmp_path), CMAKE_ARGS=QUICK, **LITTLE)
    before = {child.pid for child in descendants()}
    with adopting_orphans():  # so that what is left of the build is below this process
        try:
            build = psutil.Popen(argv, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while not any("isa.cpp" in " ".join(_cmdline(each)) for each in build.children(recursive=True)):
                assert build.poll() is None, "the build ended before it compiled"
                time.sleep(0.1)  # looking costs the build its processor
            tree = [build, *build.children(recursive=True)]
            signal_all(tree, signal.SIGKILL)  # pip, CMake, ninja and, in the middle of a file, compilers
            assert build.wait(30) == -signal.SIGKILL
        finally:
            end_processes(before, seconds=0)  # ninja gives each compiler a group of its own
    assert not list((tmp_path / "out").glob("*.whl"))

    done = _wheel(sdist, tmp_path / "out", TMPDIR=str(tmp_path), CMAKE_ARGS=QUICK, **LITTLE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deepspeed/ops/native/_deepspeed_native.so" in _members(tmp_path / "out")[1]


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []
