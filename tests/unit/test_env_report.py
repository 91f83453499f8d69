from __future__ import annotations

import json
import platform
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from rich.console import Console

import deepspeed
from deepspeed import env_report
from deepspeed.env_report import OpState, as_json, cli_main, gather, main, report_lines
from deepspeed.ops.op_builder import ALL_OPS

Usage = namedtuple("Usage", "total used free")


def test_the_report_names_versions_paths_and_devices() -> None:
    facts = {fact.key: fact.value for fact in gather().facts}
    assert facts["torch_version"] == torch.__version__
    assert facts["deepspeed_version"] == deepspeed.__version__
    assert facts["deepspeed_path"] == str(Path(deepspeed.__file__).parent)
    assert platform.python_version() in facts["python"]
    assert facts["accelerator"].startswith(deepspeed.get_accelerator().device_name())
    assert facts["backend"] == deepspeed.get_accelerator().communication_backend_name()
    assert "GB" in facts["shm"]


def test_every_operator_is_listed_with_the_reason() -> None:
    ops = {op.name: op for op in gather().ops}
    assert set(ops) == set(ALL_OPS)
    assert ops["cpu_adam"] == OpState("cpu_adam", True, True, "served by deepspeed.ops.adam, on torch's kernels")
    assert ops["gds"] == OpState("gds", False, False, "not built yet in this version")


@pytest.mark.parametrize(("megabytes", "is_warned"), [(64, True), (511, True), (512, False), (4096, False)])
def test_little_shared_memory_is_warned_about(megabytes: int, is_warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_report.shutil, "disk_usage", lambda _path: Usage(megabytes * 2**20, 0, 0))
    report = gather()
    assert bool(report.warnings) is is_warned
    assert any("--shm-size" in line for line in report_lines(report, with_ops=True, with_warnings=True)) is is_warned
    assert not any("--shm-size" in line for line in report_lines(report, with_ops=True, with_warnings=False))


def test_a_machine_without_shared_memory_is_told_and_not_warned_about(tmp_path: Path) -> None:
    report = gather(tmp_path / "none")
    assert ("shm", "absent") in {(fact.key, fact.value) for fact in report.facts}
    assert not report.warnings


def test_the_json_form_holds_everything() -> None:
    told = json.loads(as_json(gather()))
    assert told["ops"]["fused_adam"]["installed"] is True
    assert told["ops"]["async_io"] == {"installed": False, "compatible": False, "reason": "not built yet in this version"}
    assert told["torch_version"] == torch.__version__
    assert told["warnings"] == [] or "MB" in told["warnings"][0]


def test_the_command_prints_plain_lines_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    cli_main([])
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert [line for line in text.splitlines() if line.split()[:3] == ["cpu_adam", "[YES]", "[OKAY]"]]
    assert [line for line in text.splitlines() if line.split()[:3] == ["async_io", "[NO]", "[NO]"]]
    assert "torch version" in text


def test_operators_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    cli_main(["--hide_operator_status", "--hide_errors_and_warnings"])
    assert "cpu_adam" not in capsys.readouterr().out
    main(hide_operator_status=True)
    assert "cpu_adam" not in capsys.readouterr().out


def test_json_is_one_object_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    cli_main(["--json"])
    assert json.loads(capsys.readouterr().out)["deepspeed_version"] == deepspeed.__version__


def test_a_terminal_gets_tables_with_the_marks_spelt_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_report, "Console", lambda: Console(force_terminal=True, width=120))
    main()
    text = capsys.readouterr().out
    assert "\x1b[32m[OKAY]" in text
    assert "[YES]" in text
    assert "torch version" in text
