"""The command `ds_to_universal`, from its arguments to a resume by the original itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.checkpoint import open_checkpoint
from deepspeed.checkpoint.ds_to_universal import main
from deepspeed.checkpoint.original.reading.universal import UniversalSource
from tests.support.original_net import FIXTURES, full_weights
from tests.support.original_runs import ORIGINAL, run_engines, two_groups

REPOSITORY = Path(__file__).parents[2]
STAGE2 = str(FIXTURES / "stage2-bf16" / "step3")


def command(source: str | Path, output: Path, *more: str) -> list[str]:
    return ["--input_folder", str(source), "--output_folder", str(output), *more]


def assert_equal_weights(one: Path, other: Path) -> None:
    found, expected = (full_weights(open_checkpoint(folder.parent, folder.name)) for folder in (one, other))
    assert found.keys() == expected.keys()
    assert all(torch.equal(value.float(), expected[name].float()) for name, value in found.items())


def test_the_command_writes_a_folder_and_its_pointer_and_says_so(tmp_path: Path) -> None:
    arguments = command(STAGE2, tmp_path / "step3_universal", "--inject_missing_state", "--num_extract_workers", "1")
    run = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *arguments, "--num_merge_workers", "7"]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(run, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "args = Namespace(" in done.stdout
    assert "num_merge_workers=7" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest_universal", "step3_universal"]
    assert (tmp_path / "latest_universal").read_bytes() == b"step3_universal"
    assert_equal_weights(tmp_path / "step3_universal", Path(STAGE2))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("{stage}", "{tmp}/u"), "is the folder of all tags. Tags there: 'step3'. Give one of them"),
        (("{stage}/step9", "{tmp}/u"), "is no folder. Give the folder of one tag. In the folder above it: 'step3'"),
        (("{tmp}", "{tmp}/u"), "lie in one another"),
        (("{stage}/step3", "{stage}/step3/u"), "lie in one another"),
        (("{stage}/step3", "{tmp}/u"), "--inject_missing_state"),
        (("{stage}/step3", "{tmp}/u", "--num_merge_workers", "0"), "at least 1"),
    ],
)
def test_wrong_use_says_what_to_do_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], text: str
) -> None:
    source, output, *more = (argument.format(stage=FIXTURES / "stage2-bf16", tmp=tmp_path) for argument in arguments)
    assert main(command(source, Path(output), *more)) == 1
    assert text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_input_is_refused_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(STAGE2, tmp_path / "a" / "u", "--inject_missing_state")) == 0
    path = tmp_path / "a" / "u" / "zero" / "fc1.weight" / "fp32.pt"
    content = path.read_bytes()
    place = content.index(torch.load(path)["param"].numpy().tobytes())
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    assert main(command(tmp_path / "a" / "u", tmp_path / "b" / "u")) == 1
    assert "zero/fc1.weight/fp32.pt" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


KILLED = """
import os, signal, sys
from deepspeed.checkpoint.ds_to_universal import main
from deepspeed.checkpoint.original.writing import to_universal

def dies_at(number, function):
    calls = [0]
    def counted(*arguments):
        calls[0] += 1
        if calls[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return counted

for number in map(int, sys.argv[1].split(",")):
    child = os.fork()
    if child == 0:
        to_universal.save_archive = dies_at(number, to_universal.save_archive)
        to_universal.point_to = dies_at(number - 1000, to_universal.point_to)
        os._exit(main(sys.argv[2:]))
    status = os.waitpid(child, 0)[1]
    assert status == (signal.SIGKILL if number else 0), (number, status)
    print("left", *sorted(os.listdir(os.path.dirname(sys.argv[5]))), flush=True)
"""


def test_a_kill_at_any_moment_leaves_the_old_folder_or_the_new_one(tmp_path: Path) -> None:
    """The numbers are files at which the process dies; 0: it lives; 1001: between the folder and its pointer."""
    output = tmp_path / "out" / "u"
    numbers = [1, 9, 25, 0, 1, 17, 1001]
    arguments = command(STAGE2, output, "--inject_missing_state")
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-c", KILLED, ",".join(map(str, numbers)), *arguments]
    done = subprocess.run(run, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    left = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("left ")]
    for names in left[:3]:
        assert len(names) == 1, names  # what the kill before it left was cleaned up
        assert names[0].startswith(".u.converting-")
    assert left[3] == left[6] == ["latest_universal", "u"]
    for names in left[4:6]:
        assert names[1:] == ["latest_universal", "u"]
    assert_equal_weights(output, Path(STAGE2))
    assert (output.parent / "latest_universal").read_text() == "u"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and buffers in the highest precision stored, and the optimizer's tensors, in fp32."""
    source = open_checkpoint(folder)
    moments = {name: source.read(name).view(source.shape(name)) for name in source.names("optimizer/")}
    return {name: value.float() for name, value in (full_weights(source) | moments).items()}


@pytest.mark.skipif(
    not Path(ORIGINAL).is_file(), reason="DEEPSPEED_ORIGINAL_PYTHON names no Python that has the original 0.19.8"
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_original_goes_on_from_our_universal_folder_as_we_do(tmp_path: Path, world_size: int) -> None:
    """Two groups, frozen weights and a tie, trained by us at ZeRO stages 1 (fp32) and 3 (bf16).

    The original does not load frozen weights from a universal folder; the seed makes the model's own the same. At stage 3 it
    gives all groups the first one's hyperparameters and counts the step once per sub-group, so only what it loaded and the
    losses before its first update are compared there.

    fp32: sums in other orders, a few units in the last place of losses near 3. bf16: roundings of 2**-9 at other places.
    """
    universal = {"checkpoint": {"load_universal": True}}
    origins, reports = [(1, "fp32"), (3, "bf16")], {}
    training = [
        {"config": two_groups(stage, dtype), "load": None, "save": str(tmp_path / dtype), "steps": 3, "seed": 0}
        for stage, dtype in origins
    ]
    run_engines(sys.executable, tmp_path / "training", 2, training)
    for _, dtype in origins:
        assert main(command(tmp_path / dtype / "global_step3", tmp_path / dtype / "universal")) == 0
        assert isinstance(open_checkpoint(tmp_path / dtype, prefer_universal=True), UniversalSource)
    targets = [(stage, dtype) for _, dtype in origins for stage in (1, 2, 3)]
    for who, python in (("ours", sys.executable), ("original", ORIGINAL)):
        cases: list[dict[str, Any]] = [
            {
                "config": two_groups(stage, dtype, **universal),
                "load": str(tmp_path / dtype),
                "save": str(tmp_path / who / f"{stage}{dtype}"),
                "steps": 2,
                "seed": 0,
            }
            for stage, dtype in targets
        ]
        reports[who] = run_engines(python, tmp_path / f"run-{who}", world_size, cases)
    for rank in range(world_size):
        for number, target in enumerate(targets):
            mine, its = (reports[who][rank][number] for who in ("ours", "original"))
            tolerance = 2e-6 if target[1] == "fp32" else 2e-3
            compared = 2 if target[0] == 3 else 4
            assert its["losses"][:compared] == pytest.approx(mine["losses"][:compared], rel=tolerance), target
            assert its["rates"] == pytest.approx(mine["rates"], rel=1e-9)
            assert {key: its[key] for key in ("steps", "samples", "epoch")} == {
                key: mine[key] for key in ("steps", "samples", "epoch")
            }
    for stage, dtype in targets:
        mine_loaded, its_loaded = (tensors_of(tmp_path / who / f"{stage}{dtype}-loaded") for who in ("ours", "original"))
        assert its_loaded.keys() == mine_loaded.keys()
        assert all(torch.equal(value, mine_loaded[name]) for name, value in its_loaded.items()), (stage, dtype)
