"""The commands, called in this process where one is enough."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from deepspeed.errors import FileIoError
from deepspeed.nvme import ds_io_main, ds_nvme_tune_main
from deepspeed.nvme.chart import Bar, bars_svg
from deepspeed.nvme.io_command import together
from deepspeed.nvme.scratch import scratch_folders
from deepspeed.nvme.workload import ENGINES, Loop


def ds_io(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as ended:
        ds_io_main(arguments)
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


@pytest.mark.parametrize("direction", [[], ["--read"]])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_moves_the_bytes_it_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, engine: str, direction: list[str]
) -> None:
    code, out, err = ds_io(
        capsys,
        "--folder",
        str(tmp_path),
        "--io_size",
        "100001",
        "--engine",
        engine,
        "--validate",
        "--loops",
        "2",
        *direction,
    )
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "Testing DeepNVMe python frontend"
    assert [line.split()[0] for line in lines[2:5]] == ["warm-up", "1", "2"]
    assert lines[5].startswith(f"{'read' if direction else 'write'} 1 x 100001 by {engine}, block 1M, depth 32, threads 1: ")
    assert "(median of 2;" in lines[5]
    assert os.listdir(tmp_path) == []


def test_several_processes_add_up_and_a_picture_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    places = [f"{tmp_path}/a:0", f"{tmp_path}/b:1"]
    plot = tmp_path / "plot.svg"
    code, out, _ = ds_io(
        capsys, "--folder_to_device_mapping", *places, "--io_size", "64K", "--io_parallel", "2", "--plot", str(plot)
    )
    assert code == 0
    assert "write 2 x 64K by aio_handle" in out
    root = ElementTree.parse(plot).getroot()
    assert len([rect for rect in root if rect.tag.endswith("rect")]) == 1 + 4  # the ground, a warm-up and three loops
    assert os.listdir(tmp_path / "a") == os.listdir(tmp_path / "b") == []


def test_a_loop_of_several_processes_lasts_as_long_as_the_slowest() -> None:
    first = [Loop(1.0, 0.1, True), Loop(2.0, 0.2, False)]
    second = [Loop(3.0, 0.1, True), Loop(1.0, 0.3, False)]
    warm, counted = together([first, second], 10**9)
    assert (warm.seconds, warm.gb_per_second, warm.is_warmup) == (3.0, pytest.approx(2 / 3), True)
    assert (counted.seconds, counted.cpu_seconds, counted.nbytes) == (2.0, pytest.approx(0.5), 2 * 10**9)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--folder", "X", "--io_size", "900T"], 1, "bytes are free there. Give a smaller --io_size"),
        (["--folder", "X/none", "--io_size", "1M"], 1, "is not a folder that this user may write to"),
        (["--folder_to_device_mapping", "X", "--io_size", "1M"], 1, "give PATH:ID"),
        (["--folder", "X"], 2, "--io_size"),
        (["--folder", "X", "--io_size", "8Q"], 2, "'8Q' is not a size. Give bytes, or a number with K, M, G or T"),
        (["--io_size", "1M"], 2, "give either --folder or --folder_to_device_mapping"),
        (["--folder", "X", "--io_size", "1M", "--use_gds"], 2, "--use_gds: not built yet"),
        (["--folder", "X", "--io_size", "1M", "--gpu"], 2, "no accelerator that torch can use"),
        (["--folder", "X", "--io_size", "1M", "--loops", "0"], 2, "--loops 0: at least 1"),
        (["--folder", "X", "--io_size", "1M", "--torch_legacy_save"], 2, "it is for torch_io and torch_fastio"),
        (["--folder", "X", "--io_size", "1M", "--warmup_loops", "-1"], 2, "--warmup_loops -1: at least 0"),
        (["--folder", "X", "--io_size", "1M", "--plot", "X/none/plot.svg"], 1, "No such file"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_a_cure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], status: int, words: str
) -> None:
    code, _, err = ds_io(capsys, *(argument.replace("X", str(tmp_path), 1) for argument in arguments))
    assert code == status
    assert words in err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("processes", "number"), [("1", signal.SIGTERM), ("2", signal.SIGINT)])
def test_an_interrupted_measurement_leaves_no_files(tmp_path: Path, processes: str, number: signal.Signals) -> None:
    command = [sys.executable, "-c", "from deepspeed.nvme import ds_io_main; ds_io_main()", "--folder", str(tmp_path)]
    command += ["--io_size", "1M", "--loops", "1000000", "--multi_process", processes]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        while not list(tmp_path.glob("*/0/file-0")):
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, number)
        process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert os.listdir(tmp_path) == []


def test_what_a_killed_measurement_left_is_removed_by_the_next_and_a_living_one_is_not(tmp_path: Path) -> None:
    with scratch_folders({tmp_path: 1}) as living:
        left = tmp_path / "deepspeed-io-test-killed"
        left.mkdir()
        (left / "file-0").write_bytes(bytes(100))
        for folder in (left, living[tmp_path]):
            os.utime(folder, (0, 0))
        with scratch_folders({tmp_path: 1}) as other:
            assert set(os.listdir(tmp_path)) == {living[tmp_path].name, other[tmp_path].name}
    assert os.listdir(tmp_path) == []


def test_space_is_added_up_over_folders_of_one_disk(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    disk = os.statvfs(tmp_path)
    most = disk.f_bavail * disk.f_frsize
    needs = {tmp_path / "a": int(most * 0.7), tmp_path / "b": int(most * 0.7)}
    with pytest.raises(FileIoError, match="bytes are free there"), scratch_folders(needs):
        pass
    assert os.listdir(tmp_path / "a") == os.listdir(tmp_path / "b") == []


def test_the_tuner_prints_a_block_and_leaves_a_log_and_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "sweep.json").write_text('{"block_size": ["64K", "1M"], "queue_depth": [4], "single_submit": [false]}')
    arguments = ["--nvme_dir", str(tmp_path / "disk"), "--io_size", "2M", "--log_dir", str(tmp_path / "log"), "--verbose"]
    with pytest.raises(SystemExit) as ended:
        ds_nvme_tune_main([*arguments, "--sweep_config", str(tmp_path / "sweep.json")])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert out.count("GB/s") == 2 * (2 * 2 * 2 + 3) + 4
    block = json.loads(out[out.index("{") :])["aio"]
    assert block["block_size"] in (64 << 10, 1 << 20)
    assert block["queue_depth"] == 4
    log = [json.loads(line) for line in (tmp_path / "log" / "sweep.jsonl").read_text().splitlines()]
    assert len(log) == 2 * 2 * 2 + 3
    assert [one["loops"] for one in log[-4:]] == [1, 3, 3, 3]
    assert all(one["read"] > 0 and one["write"] > 0 for one in log)
    ElementTree.parse(tmp_path / "log" / "sweep.svg")
    assert os.listdir(tmp_path / "disk") == []


@pytest.mark.parametrize("left_out", ["read", "write"])
def test_the_tuner_leaves_out_a_direction(capsys: pytest.CaptureFixture[str], tmp_path: Path, left_out: str) -> None:
    (tmp_path / "sweep.json").write_text(
        '{"block_size": ["1M"], "queue_depth": [4], "io_parallel": [1], "single_submit": [false],'
        ' "sequential_requests": [false]}'
    )
    arguments = ["--nvme_dir", str(tmp_path), "--io_size", "1M", "--log_dir", str(tmp_path / "log"), f"--no_{left_out}"]
    with pytest.raises(SystemExit) as ended:
        ds_nvme_tune_main([*arguments, "--sweep_config", str(tmp_path / "sweep.json")])
    assert ended.value.code == 0
    assert f"best {left_out}" not in capsys.readouterr().out


def test_the_tuner_refuses_what_it_cannot_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, status, words in (
        (["--nvme_dir", str(tmp_path / "none")], 1, "is not a folder"),
        (["--nvme_dir", str(tmp_path), "--no_read", "--no_write"], 2, "nothing to measure"),
        (["--nvme_dir", str(tmp_path), "--gds"], 2, "--gds: not built yet"),
        (["--nvme_dir", str(tmp_path), "--gpu"], 2, "no accelerator that torch can use"),
        (["--nvme_dir", str(tmp_path), "--loops", "0"], 2, "--loops 0: at least 1"),
        (["--nvme_dir", str(tmp_path), "--sweep_config", str(tmp_path / "none")], 1, "No such file"),
    ):
        with pytest.raises(SystemExit) as ended:
            ds_nvme_tune_main(arguments)
        assert ended.value.code == status
        assert words in capsys.readouterr().err


def test_a_picture_is_valid_whatever_the_labels() -> None:
    for bars in ([], [Bar("<a & b>", 0.0)], [Bar("x", 1.0), Bar("y", 2.5, True)]):
        assert ElementTree.fromstring(bars_svg("a < b", "GB/s", bars)).tag.endswith("svg")
