"""`Trainer.hyperparameter_search`: many trainings in one process, each as if it were the only one."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.clients import CURVE_TOLERANCE, tiny_llama
from tests.support.ranks import run_ranks
from tests.support.trainer import Update, assert_same_run, auto_config, trainer, updates

pytest.importorskip("optuna", reason="optuna is not installed: pip install deepspeed[clients]")

_EVAL_ROWS, _STEPS = 7, 3
_SPACE: dict[str, list[Any]] = {"learning_rate": [1e-2, 3e-3], "gradient_accumulation_steps": [1, 2]}
_TRIALS = 4  # every pair once


class _Trial(NamedTuple):
    """One training of a search."""

    settings: dict[str, Any]
    curve: list[Update]
    loss: float


def _fresh() -> Any:
    """The model of a new training; the client refuses functions that could take arguments."""
    return tiny_llama()


def _space(trial: Any) -> dict[str, Any]:
    return {name: trial.suggest_categorical(name, choices) for name, choices in _SPACE.items()}


def _alone(folder: str, config: dict[str, Any] | None, settings: dict[str, Any]) -> _Trial:
    run = trainer(folder, config, make_model=_fresh, eval_rows=_EVAL_ROWS, max_steps=_STEPS, **settings)
    run.train()
    return _Trial(settings, updates(run), run.evaluate()["eval_loss"])


def _searched(folder: str, config: dict[str, Any] | None) -> tuple[list[_Trial], Any, list[int]]:
    """Trials, what the client says is best (to its first rank), and engines that lived at the end of each trial."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    run = trainer(folder, config, make_model=_fresh, eval_rows=_EVAL_ROWS, max_steps=_STEPS)
    trials: list[_Trial] = []
    engines: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def objective(metrics: dict[str, float]) -> float:
        trials.append(_Trial({name: getattr(run.args, name) for name in _SPACE}, updates(run), metrics["eval_loss"]))
        engines.append(weakref.ref(run.model_wrapped))
        gc.collect()
        alive.append(sum(engine() is not None for engine in engines))
        return metrics["eval_loss"]

    sampler = optuna.samplers.GridSampler(_SPACE, seed=0)
    best = run.hyperparameter_search(
        _space, objective, n_trials=_TRIALS, direction="minimize", backend="optuna", sampler=sampler
    )
    return trials, best, alive


def _searches(rank: int, world_size: int, folder: str, stages: list[int]) -> dict[str, Any]:
    found = {}
    for name, config in {"without us": None, **{f"stage {stage}": auto_config(stage) for stage in stages}}.items():
        trials, best, alive = _searched(folder, config)
        found[name] = trials, [_alone(folder, config, trial.settings) for trial in trials], best, alive
    return found


@pytest.mark.parametrize(("world_size", "stages"), [(1, [0, 3]), (2, [2, 3])])
def test_each_trial_is_its_own_single_run_and_the_best_is_that_without_us(
    world_size: int, stages: list[int], tmp_path: Path
) -> None:
    results = run_ranks(_searches, world_size, str(tmp_path), stages, init=False, timeout_seconds=150)
    for rank, found in enumerate(results):
        expected, _, expected_best, _ = found["without us"]
        assert len({str(trial.settings) for trial in expected}) == _TRIALS
        assert len({trial.loss for trial in expected}) == _TRIALS
        for name, (trials, singles, best, alive) in found.items():
            print(name)  # shown where the comparison fails
            for trial, single, theirs in zip(trials, singles, expected, strict=True):
                assert trial == single  # bit by bit: nothing is left of the training before
                assert trial.settings == theirs.settings
                assert_same_run(trial.curve, theirs.curve)
                assert trial.loss == pytest.approx(theirs.loss, rel=0, abs=CURVE_TOLERANCE)
            assert (best is None) is (rank > 0)
            assert best is None or (best.run_id, best.hyperparameters) == (
                expected_best.run_id,
                expected_best.hyperparameters,
            )
            assert name == "without us" or alive == [1] * _TRIALS  # the engine of a trial is gone before the next one trains
