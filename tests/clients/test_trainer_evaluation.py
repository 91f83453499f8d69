"""A Trainer evaluates, generates and keeps its best model with us as it does without."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.clients import CURVE_TOLERANCE, VOCABULARY, Sentences, tiny_llama
from tests.support.ranks import run_ranks
from tests.support.trainer import Update, arguments, assert_same_run, auto_config, trainer, updates

_CONFIGS: dict[str, dict[str, Any] | None] = {"without us": None, **{f"stage {n}": auto_config(n) for n in (1, 2, 3)}}
_EVAL_ROWS = 7  # not a multiple of anything: the last batch is ragged, and one rank has padding


class _Evaluated(NamedTuple):
    curve: list[Update]
    losses: list[float]
    best: str
    after: float
    tokens: list[list[int]]


def _tiny_t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def _evaluated(folder: str, config: dict[str, Any] | None) -> _Evaluated:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    made = arguments(
        folder,
        config,
        cls=Seq2SeqTrainingArguments,
        max_steps=6,
        predict_with_generate=True,
        generation_max_length=8,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the first is "best", so that loading it changes the weights
    )
    unseen = Sentences(_EVAL_ROWS, seed=1)
    run = Seq2SeqTrainer(_tiny_t5(), made, train_dataset=Sentences(), eval_dataset=unseen)
    run.train()
    losses = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
    after = run.evaluate()["eval_loss"]
    tokens = run.predict(unseen).predictions.tolist()
    return _Evaluated(updates(run), losses, Path(run.state.best_model_checkpoint).name, after, tokens)


def _evaluates(rank: int, world_size: int, folder: str) -> dict[str, _Evaluated]:
    return {name: _evaluated(f"{folder}/{name}", config) for name, config in _CONFIGS.items()}


def test_losses_tokens_and_the_best_model_are_those_without_us(tmp_path: Path) -> None:
    for runs in run_ranks(_evaluates, 2, str(tmp_path), init=False, timeout_seconds=180):
        expected = runs.pop("without us")
        assert expected.after == pytest.approx(expected.losses[0]) != expected.losses[-1]
        assert len(expected.tokens) == _EVAL_ROWS + 1  # the client keeps the padding row here
        assert len({token for row in expected.tokens for token in row}) > 2
        for name, got in runs.items():
            print(name)  # shown where the comparison fails
            assert_same_run(got.curve, expected.curve)
            assert got.losses == pytest.approx(expected.losses, rel=0, abs=CURVE_TOLERANCE)
            assert (got.best, got.tokens) == ("checkpoint-2", expected.tokens)
            assert got.after == pytest.approx(expected.after, rel=0, abs=CURVE_TOLERANCE)


def _fresh() -> Any:
    """The model of a new training; the client refuses functions that could take arguments."""
    return tiny_llama()


def _comes_back(rank: int, world_size: int, folder: str) -> dict[str, tuple[list[Update], list[float]]]:
    """Evaluate; train from the start twice, as a search over settings does; train what came of it once more."""
    results = {}
    for name, config in _CONFIGS.items():
        losses = []
        if name in {"without us", "stage 3"}:  # at other stages the client does not evaluate before training
            losses.append(trainer(folder, config, eval_rows=_EVAL_ROWS).evaluate()["eval_loss"])
        run = trainer(folder, config, make_model=_fresh, eval_rows=_EVAL_ROWS, max_steps=3)
        curve: list[Update] = []
        for _ in range(2):
            run.train()
            curve += updates(run)
            losses.append(run.evaluate()["eval_loss"])
        again = trainer(folder, config, model=run.model, eval_rows=_EVAL_ROWS, max_steps=3)
        again.model.config.use_cache = True
        again.train()
        losses.append(again.evaluate()["eval_loss"])
        results[name] = curve + updates(again), losses
    return results


def test_models_are_trained_and_evaluated_again(tmp_path: Path) -> None:
    for runs in run_ranks(_comes_back, 2, str(tmp_path), init=False, timeout_seconds=180):
        expected_curve, expected_losses = runs.pop("without us")
        assert expected_curve[:3] == expected_curve[3:6] != expected_curve[6:]
        for name, (curve, losses) in runs.items():
            print(name)  # shown where the comparison fails
            assert_same_run(curve, expected_curve)
            assert losses == pytest.approx(expected_losses[-len(losses) :], rel=0, abs=CURVE_TOLERANCE)
