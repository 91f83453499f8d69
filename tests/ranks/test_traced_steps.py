"""A trace that cannot be written: told before training, and no reason to end a run afterwards."""

from __future__ import annotations

from pathlib import Path

from tests.support.monitors import run_script

ENGINE = """
import pathlib, torch
from deepspeed.engine.traced_steps import TracedSteps
from tests.support.engines import config, make_engine

model = torch.nn.Linear(2, 1)
engine = make_engine(model, config(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
folder = pathlib.Path(FOLDER, "traces")
"""


def test_a_folder_that_cannot_be_made_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "traces").touch()
    body = """
try:
    TracedSteps(engine, 1, 2, folder).start()
finally:
    assert "_update" not in engine.__dict__, "something is left on the engine"
"""
    done = run_script(ENGINE + body, tmp_path)
    assert done.returncode == 1
    (last,) = [line for line in done.stderr.splitlines() if "ArgumentError: " in line]
    assert "--profile-folder" in last
    assert "no trace can be written there" in last
    assert "Name another one" in last


def test_a_trace_that_cannot_be_written_is_warned_of_and_training_goes_on(tmp_path: Path) -> None:
    body = """
TracedSteps(engine, 1, 1, folder).start()
folder.rmdir()
for _ in range(2):
    engine.backward(engine(torch.ones(4, 2)).mean())
    engine.step()
print("steps:", engine.global_steps)
"""
    done = run_script(ENGINE + body, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "steps: 2" in done.stdout
    assert (done.stdout + done.stderr).count("there is none of this rank") == 1
