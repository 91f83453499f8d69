"""Transformers' Trainer with a JSON file of ours learns as it does without us, at every ZeRO stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.optim.lr_scheduler import LambdaLR

from tests.support.ranks import run_ranks
from tests.support.trainer import Update, assert_same_run, auto_config, trainer, updates

_STAGES = (0, 1, 2, 3)
_PLAIN, _DELAYED = "without us", "without us, the published schedule"

# 35 rows in micro-batches of 2 over 2 ranks: 9 a rank, so the last update of an epoch has one micro-batch in place of two,
# and its rows are partly the first ones again. Norms of this model are near 1.5: half of them are clipped.
_WARM_UP, _UPDATES, _NORM = 3, {1: 18, 2: 10}, 1.5
_SETTINGS = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "max_grad_norm": _NORM, "warmup_steps": _WARM_UP}
_ROWS = 35


def _configs(folder: Path) -> dict[str, tuple[str, str]]:
    """The file of each run and the reference that it must equal: all four pairings of optimizer and schedule."""
    configs: dict[str, tuple[dict[str, Any], str]] = {f"stage {n}": (auto_config(n), _PLAIN) for n in _STAGES}
    for stage in (1, 3):
        configs[f"our optimizer, stage {stage}"] = auto_config(stage, optimizer=True), _PLAIN
        configs[f"our schedule, stage {stage}"] = auto_config(stage, scheduler=True), _DELAYED
        configs[f"our optimizer and schedule, stage {stage}"] = auto_config(stage, optimizer=True, scheduler=True), _DELAYED
    files = {}
    for number, (name, (config, reference)) in enumerate(configs.items()):
        file = folder / f"{number}.json"
        file.write_text(json.dumps(config))
        files[name] = str(file), reference
    return files


def _delay_schedule(run: Any, updates_to_do: int) -> None:
    """Give a run without us the published WarmupDecayLR: the client's linear one, an update late, and 0 before."""

    def factor(update: int) -> float:
        at = max(update - 1, 0)
        return min(at / _WARM_UP, (updates_to_do - at) / (updates_to_do - _WARM_UP))

    run.lr_scheduler = LambdaLR(run.create_optimizer(), factor)


def _runs(rank: int, world_size: int, folder: str, files: dict[str, tuple[str, str]]) -> dict[str, list[Update]]:
    curves = {}
    for name in (_PLAIN, _DELAYED, *files):
        run = trainer(folder, Path(files[name][0]) if name in files else None, rows=_ROWS, **_SETTINGS)
        if name == _DELAYED:
            _delay_schedule(run, _UPDATES[world_size])
        run.train()
        assert run.state.global_step == _UPDATES[world_size]
        curves[name] = updates(run)
    return curves


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_trainer_learns_as_it_does_without_us(world_size: int, tmp_path: Path) -> None:
    files = _configs(tmp_path)
    for curves in run_ranks(_runs, world_size, str(tmp_path), files, init=False, timeout_seconds=180):
        norms = [update.grad_norm for update in curves[_PLAIN]]
        assert min(norms) < _NORM < max(norms)
        for name, (_, reference) in files.items():
            print(name)  # shown where the comparison fails
            assert_same_run(curves[name], curves[reference], rates_ahead=name.startswith("our"))
