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
from deepspeed.ops.native import ABI_VERSION, BuildRecord, absence, library
from deepspeed.ops.op_builder import ALL_OPS, CPUAdamBuilder

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


def test_every_operator_is_listed_with_what_serves_it() -> None:
    ops = {op.name: op for op in gather().ops}
    assert set(ops) == set(ALL_OPS)
    assert ops["fused_adam"] == OpState(
        "fused_adam", True, True, "served by deepspeed.ops.adam, on torch's kernels", "torch"
    )
    assert ops["sparse_attn"] == OpState("sparse_attn", False, False, "not built yet in this version", "none")


@pytest.mark.skipif(library() is None, reason="needs the native library, which this installation lacks")
def test_the_native_library_is_described() -> None:
    report, found = gather(), library()
    assert found is not None
    facts = {fact.key: fact.value for fact in report.facts}
    assert facts["native_path"] == str(found.path)
    assert facts["native_isa"] in ("avx512", "avx2", "generic")
    assert facts["native_compiler"].startswith(("gcc ", "clang "))
    assert str(ABI_VERSION) in facts["native_abi"]
    assert "cpu_adam" in facts["native_operators"]
    ops = {op.name: op for op in report.ops}
    assert ops["cpu_adam"].state == "native"
    assert found.isa in ops["cpu_adam"].reason
    assert not [text for text in report.warnings if "twin" in text]


def test_without_the_library_the_report_says_why_and_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, without_native_library: str
) -> None:
    report = gather()
    facts = {fact.key: fact.value for fact in report.facts}
    assert facts["native_path"] == "absent"
    assert facts["native_absence"] == without_native_library == absence()
    op = {op.name: op for op in report.ops}["cpu_adam"]
    assert (op.installed, op.compatible, op.state) == (False, True, "twin")
    assert "DS_NATIVE=0 is set" in op.reason
    (warning,) = [text for text in report.warnings if "twin" in text]
    assert "cpu_adam" in warning
    assert "DS_NATIVE=0 is set" in warning
    assert "DS_BUILD_OPS=1" in warning
    assert f"cpu_adam takes about {CPUAdamBuilder.TWIN_COST}" in warning
    assert json.loads(as_json(report))["native_absence"] == "DS_NATIVE=0 is set"


def test_settings_that_the_installation_left_aside_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_report, "build_record", lambda: BuildRecord("", (), (), ("DS_BUILD_CPUADAM=1 was set",)))
    assert "DS_BUILD_CPUADAM=1 was set" in gather().warnings


@pytest.mark.parametrize(("megabytes", "is_warned"), [(64, True), (511, True), (512, False), (4096, False)])
def test_little_shared_memory_is_warned_about(megabytes: int, is_warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_report.shutil, "disk_usage", lambda _path: Usage(megabytes * 2**20, 0, 0))
    report = gather()
    assert any("/dev/shm" in text for text in report.warnings) is is_warned
    assert any("--shm-size" in line for line in report_lines(report, with_ops=True, with_warnings=True)) is is_warned
    assert not any("--shm-size" in line for line in report_lines(report, with_ops=True, with_warnings=False))


def test_a_machine_without_shared_memory_is_settled_and_not_warned_about(tmp_path: Path) -> None:
    report = gather(tmp_path / "none")
    assert ("shm", "absent") in {(fact.key, fact.value) for fact in report.facts}
    assert not [text for text in report.warnings if "shm" in text]


def test_the_json_form_holds_everything() -> None:
    told = json.loads(as_json(gather()))
    assert told["ops"]["fused_adam"]["installed"] is True
    reason = "not built yet in this version"
    assert told["ops"]["sparse_attn"] == {"installed": False, "compatible": False, "reason": reason, "state": "none"}
    assert told["torch_version"] == torch.__version__
    assert isinstance(told["warnings"], list)


def test_the_command_prints_plain_lines_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    cli_main([])
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert [line for line in text.splitlines() if line.split()[:3] == ["fused_adam", "[YES]", "[OKAY]"]]
    assert [line for line in text.splitlines() if line.split()[:3] == ["sparse_attn", "[NO]", "[NO]"]]
    assert "torch version" in text


def test_operators_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    cli_main(["--hide_operator_status", "--hide_errors_and_warnings"])
    assert "fused_adam" not in capsys.readouterr().out
    main(hide_operator_status=True)
    assert "fused_adam" not in capsys.readouterr().out


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


def test_a_hostfile_that_cannot_be_used_is_settled_in_a_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "hosts").write_text("worker-0\n")
    with pytest.raises(SystemExit) as ended:
        cli_main(["--all-hosts", "-H", str(tmp_path / "hosts")])
    assert ended.value.code == 1
    assert "line 1: Hostfile contains a bad entry: 'worker-0'" in caplog.text
