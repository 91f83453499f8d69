"""Fresh processes: what a worker says comes back, whatever happens to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.cases import ORIGINAL, OURS, Case
from benchmarks.harness.ranks import Interpreters, remove_segments, run_case
from deepspeed.launcher.processes import adopting_orphans, descendants, end_processes


def case(benchmark: str = "import_time") -> Case:
    return Case("t", benchmark, (OURS,), ("import_cpu_s",), of=OURS)


def test_a_run_brings_back_figures_and_what_was_measured(tmp_path: Path) -> None:
    run = run_case(case(), OURS, 0, Interpreters(tmp_path))
    assert run.error is None
    assert run.measured is not None
    assert run.measured.figures["import_cpu_s"] < run.measured.figures["torch_cpu_s"]
    assert set(run.versions) == {"python", "torch", "deepspeed"}


def test_a_failure_is_a_result_without_paths_of_the_machine(tmp_path: Path) -> None:
    run = run_case(case("nothing_of_that_name"), OURS, 0, Interpreters(tmp_path))
    assert run.measured is None
    assert run.error == "ModuleNotFoundError: No module named 'benchmarks.nothing_of_that_name'"


def test_an_interpreter_that_cannot_start_the_worker_is_reported_with_its_last_line(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho first; echo /some/where/said why >&2; exit 3\n")
    python.chmod(0o755)
    run = run_case(case(), ORIGINAL, 0, Interpreters(tmp_path, str(python)))
    assert run.error is not None
    assert run.error.endswith("said why")
    assert "/some/where" not in run.error


def test_the_tree_does_not_pass_for_the_original(tmp_path: Path) -> None:
    run = run_case(case(), ORIGINAL, 0, Interpreters(tmp_path, sys.executable))
    assert run.error is not None
    assert "of this tree; needed the original package" in run.error


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    run = run_case(case(), OURS, 0, Interpreters(tmp_path), timeout_seconds=0)
    assert run.error is not None
    assert run.error.startswith("not done in time")


def test_nothing_is_left_in_the_work_folder(tmp_path: Path) -> None:
    run_case(case("nothing_of_that_name"), OURS, 0, Interpreters(tmp_path / "work"))
    assert list((tmp_path / "work").iterdir()) == []


def test_a_lock_that_a_stopped_build_left_is_removed(tmp_path: Path) -> None:
    lock = tmp_path / "compiled-by-original" / "some_op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    kept = Interpreters(tmp_path, "python").compiled(ORIGINAL, tmp_path / "scratch", is_cold=False)
    assert kept == tmp_path / "compiled-by-original"
    assert not lock.exists()


def _is_kept(lock: Path, work: Path) -> bool:
    Interpreters(work, "python").compiled(ORIGINAL, work / "scratch", is_cold=False)
    return lock.exists()


def test_a_lock_of_a_build_that_goes_on_is_kept(tmp_path: Path) -> None:
    lock = tmp_path / "compiled-by-original" / "some_op" / "lock"
    lock.parent.mkdir(parents=True)
    descriptor = os.open(lock, os.O_CREAT | os.O_EXCL)  # as torch makes it, and keeps it open
    assert _is_kept(lock, tmp_path)
    os.close(descriptor)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, cwd=lock.parent):  # a compiler
        assert _is_kept(lock, tmp_path)
    assert not _is_kept(lock, tmp_path)


def test_a_run_is_ended_with_what_has_left_its_group(tmp_path: Path) -> None:
    script = tmp_path / "python"
    code = "import subprocess; subprocess.run(['sleep', '60'], start_new_session=True)"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n')
    script.chmod(0o755)
    before = {child.pid for child in descendants()}
    with adopting_orphans():
        try:
            run = run_case(case(), ORIGINAL, 0, Interpreters(tmp_path, str(script)), timeout_seconds=1)
            assert run.error is not None
            assert run.error.startswith("not done in time")
            left = [child for child in descendants() if child.pid not in before]
            assert psutil.wait_procs(left, timeout=5)[1] == []
        finally:
            end_processes(before, seconds=0)


def test_the_shared_memory_that_the_original_leaves_is_removed_and_no_other(tmp_path: Path) -> None:
    for port in (4001, 4002):
        (tmp_path / f"deepspeed_buffer_0_127.0.0.1_{port}_1").touch()
    remove_segments(4001, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["deepspeed_buffer_0_127.0.0.1_4002_1"]


def test_the_original_needs_an_interpreter(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give --peer"):
        Interpreters(tmp_path).python(ORIGINAL)
