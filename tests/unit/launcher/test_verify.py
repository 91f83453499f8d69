"""How far two runs are apart, and which difference counts."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch

from deepspeed.checkpoint.disk.container import Entry, write_container
from deepspeed.errors import LaunchError
from deepspeed.launcher.arguments import parse_verify_args
from deepspeed.launcher.verification import VARIABLE, Verification
from deepspeed.launcher.verify import Recorded, compare, difference, report


def test_differences_are_told_by_value_and_by_change() -> None:
    start, baseline = torch.tensor([4.0, 1.0]), torch.tensor([4.0, 1.5])
    found = difference("w", 2, start, baseline, torch.tensor([4.0, 1.25]))
    assert (found.name, found.step, found.absolute) == ("w", 2, 0.25)
    assert found.relative == 0.25 / 4
    assert found.of_change == 0.5
    assert found.excess == pytest.approx(0.5, rel=1e-5)


def test_a_rounding_of_a_value_that_hardly_changes_does_not_count() -> None:
    start = torch.ones(3)
    baseline = start + 2e-7
    found = difference("w", 1, start, baseline, baseline.nextafter(torch.tensor(2.0)))
    assert found.of_change > 0.1
    assert found.excess == 0.0


def test_a_parameter_that_moves_in_one_run_only_is_infinitely_off() -> None:
    start = torch.ones(3)
    assert difference("w", 1, start, start, start + 0.5).excess == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_agree_with_themselves_only(value: float) -> None:
    start, other = torch.zeros(2), torch.ones(2)
    broken = torch.tensor([1.0, value])
    assert difference("w", 1, start, broken, broken.clone()).absolute == 0.0
    assert difference("w", 1, start, other, broken).excess == math.inf
    assert difference("w", 1, start, broken, other).excess == math.inf


def test_parameters_without_elements_agree() -> None:
    empty = torch.empty(0)
    assert difference("w", 1, empty, empty, empty).absolute == 0.0


def test_the_wish_travels_as_text_and_only_the_baseline_changes_the_config() -> None:
    wish = Verification("/somewhere", 3, is_baseline=True)
    assert Verification.from_environ({VARIABLE: wish.to_text()}) == wish
    assert Verification.from_environ({}) is None
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    assert wish.config(config) == {"train_batch_size": 8, "zero_optimization": {"stage": 0}}
    assert Verification("/somewhere", 3, is_baseline=False).config(config) == config


def test_flags_of_the_comparison_mix_with_those_of_the_launcher_and_stop_at_the_script() -> None:
    args = parse_verify_args(["--num_gpus", "2", "--steps", "5", "train.py", "--steps", "9", "--tolerance", "x"])
    assert (args.num_gpus, args.steps, args.tolerance, args.keep) == (2, 5, 1e-3, None)
    assert args.user_script == "train.py"
    assert args.user_args == ["--steps", "9", "--tolerance", "x"]


@pytest.mark.parametrize("steps", ["0", "-1", "many"])
def test_steps_must_be_a_number_above_0(steps: str) -> None:
    with pytest.raises(SystemExit):
        parse_verify_args(["--steps", steps, "train.py"])


def _run(folder: Path, values: list[float], loss: float = 1.0, name: str = "w") -> Recorded:
    """What one run leaves: parameter `name` with one value per step."""
    folder.mkdir(exist_ok=True)
    wish = Verification(str(folder), max(1, len(values) - 1), is_baseline=False)
    for step, value in enumerate(values):
        sink = io.BytesIO()
        facts = {"stage": "2", "ranks": "1", "loss": repr(loss)}
        write_container(sink, [Entry(name, (2,), torch.tensor([value, 0.0]))], facts)  # type: ignore[arg-type]
        wish.file(0, step).write_bytes(sink.getvalue())
    return Recorded(wish)


def test_the_worst_step_of_a_parameter_is_settled(tmp_path: Path) -> None:
    baseline, other = _run(tmp_path / "a", [1.0, 2.0, 3.0]), _run(tmp_path / "b", [1.0, 2.5, 3.5])
    (found,) = compare(baseline, other, 0, [0, 1, 2])
    assert (found.name, found.step, found.absolute, found.of_change) == ("w", 1, 0.5, 0.5)


def test_the_report_tells_agreement_difference_and_that_there_was_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = _run(tmp_path / "a", [1.0, 2.0])
    assert report(baseline, _run(tmp_path / "same", [1.0, 2.0]), 1e-3) == 0
    assert "1 of 1 parameters are equal in every bit" in capsys.readouterr().out
    assert report(baseline, _run(tmp_path / "near", [1.0, 2.0005]), 1e-3) == 0
    assert report(baseline, _run(tmp_path / "off", [1.0, 2.1]), 1e-3) == 1
    assert "<-- too much" in capsys.readouterr().out
    assert report(baseline, _run(tmp_path / "none", [1.0]), 1e-3) == 1
    assert "NOT COMPARED: the script ended before the first step" in capsys.readouterr().out


def test_runs_of_different_models_are_not_compared(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"train different parameters: \['v', 'w'\]"):
        report(_run(tmp_path / "a", [1.0, 2.0]), _run(tmp_path / "b", [1.0, 2.0], name="v"), 1e-3)
