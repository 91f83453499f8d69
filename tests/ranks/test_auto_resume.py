"""`elasticity.auto_resume`: a run that is started again, on other ranks, goes on as if nothing had happened.

The reference is one process that is never interrupted, in fp64: sums over ranks differ from its sums in the last bits only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from deepspeed.data import RepeatingLoader
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.errors import CheckpointDamagedError, CheckpointError
from tests.support.engines import make_engine, zero
from tests.support.models import Mlp, build
from tests.support.ranks import run_ranks

LENGTH = 30
BATCH = 12
ELASTIC = {"enabled": True, "max_train_batch_size": BATCH, "micro_batch_sizes": [1, 2], "version": 0.1}


class Samples(Dataset[Any]):
    """Rows for an Mlp, each with its number."""

    def __init__(self) -> None:
        self._inputs, self._targets = build(Mlp, dtype=torch.float64).batch(LENGTH, 3)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, int]:
        return self._inputs[number], self._targets[number], number


class Run(NamedTuple):
    """What one rank of one start of the script saw."""

    resumed_from: str | None
    client_state: dict[str, Any] | None
    first_step: int
    samples: list[list[int]]
    """Per step, the numbers of this rank's samples."""
    losses: list[float]
    """Per step, the mean of this rank's samples."""
    rates: list[float]


def _engine(folder: str | None, **more: Any) -> DeepSpeedEngine:
    model = build(Mlp, dtype=torch.float64)
    settings = {
        "elasticity": ELASTIC | ({} if folder is None else {"auto_resume": folder}),
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 0.05, "warmup_type": "linear"}},
        **zero(1),
        **more,
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return make_engine(model, settings, optimizer=optimizer, training_data=Samples())


def _script(rank: int, world_size: int, folder: str | None, until: int, save_every: int = 2) -> Run:
    """As a user writes it: nothing in it is about resuming."""
    engine = _engine(folder)
    run = Run(engine.resumed_from, engine.resumed_client_state, engine.global_steps, [], [], [])
    feed = iter(RepeatingLoader(engine.training_dataloader))
    while engine.global_steps < until:
        numbers: list[int] = []
        losses = []
        run.rates.append(engine.get_lr()[0])
        for _ in range(engine.gradient_accumulation_steps()):
            inputs, targets, read = next(feed)
            loss = engine(inputs, targets)
            engine.backward(loss)
            engine.step()
            numbers += read.tolist()
            losses.append(loss.item())
        run.samples.append(numbers)
        run.losses.append(sum(losses) / len(losses))
        if folder is not None and engine.global_steps % save_every == 0:
            engine.save_checkpoint(folder, client_state={"seen": engine.global_samples})
    engine.destroy()
    return run


def _joined(runs: list[Run]) -> tuple[list[list[int]], list[float]]:
    """Per step, what all ranks read and their mean loss."""
    samples = [sorted(n for of_rank in step for n in of_rank) for step in zip(*(run.samples for run in runs), strict=True)]
    losses = [sum(step) / len(step) for step in zip(*(run.losses for run in runs), strict=True)]
    return samples, losses


def test_a_job_that_changes_its_ranks_goes_on_as_one_process_that_never_stopped(tmp_path: Path) -> None:
    (whole,) = run_ranks(_script, 1, None, 9)
    wanted, losses = [sorted(step) for step in whole.samples], whole.losses
    folder = str(tmp_path / "run")
    start = 0
    for ranks, until, first in ((3, 5, 0), (2, 7, 4), (3, 9, 6), (1, 9, 8)):  # each lost what came after its last save
        runs = run_ranks(_script, ranks, folder, until)
        start = runs[0].first_step
        assert start == first
        read, seen = _joined(runs)
        assert read == wanted[start:until]
        assert seen == pytest.approx(losses[start:until], rel=1e-9)
        assert runs[0].rates == pytest.approx(whole.rates[start:until])
        assert (runs[0].resumed_from is None) == (first == 0)
        assert runs[0].client_state == (None if first == 0 else {"seen": first * BATCH})


def _damage(path: Path) -> None:
    shard = next(path.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run_ranks(_script, 2, str(tmp_path), 6)
    _damage(tmp_path / "global_step6")
    runs = run_ranks(_script, 2, str(tmp_path), 5)
    assert [run.first_step for run in runs] == [4, 4]
    assert runs[0].resumed_from == str(tmp_path / "global_step4")


def test_a_latest_that_names_nothing_is_passed_over(tmp_path: Path) -> None:
    run_ranks(_script, 1, str(tmp_path), 4)
    (tmp_path / "latest").write_text("gone")
    (run,) = run_ranks(_script, 1, str(tmp_path), 5)
    assert run.first_step == 4


def _expect(rank: int, world_size: int, folder: str, kind: type[Exception]) -> str:
    with pytest.raises(kind) as error:
        _engine(folder)
    return str(error.value)


def test_a_folder_in_which_nothing_is_whole_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(_script, 1, str(tmp_path), 4)
    _damage(tmp_path / "global_step2")
    _damage(tmp_path / "global_step4")
    for text in run_ranks(_expect, 2, str(tmp_path), CheckpointDamagedError):
        assert "no checkpoint there is whole" in text
        assert "global_step2" in text
        assert "global_step4" in text


def _other_model(rank: int, world_size: int, folder: str) -> str:
    model = build(Mlp, 7, dtype=torch.float64)
    settings = {"train_batch_size": 12, "elasticity": {"auto_resume": folder}}
    with pytest.raises(CheckpointError) as error:
        make_engine(model, settings, optimizer=torch.optim.Adam(model.parameters()), training_data=Samples())
    return str(error.value)


def test_a_checkpoint_of_another_model_is_an_error_and_not_passed_over(tmp_path: Path) -> None:
    run_ranks(_script, 1, str(tmp_path), 2)
    (text,) = run_ranks(_other_model, 1, str(tmp_path))
    assert "has shape" in text


def _tiers(rank: int, world_size: int, fast: str, slow: str) -> tuple[str | None, int]:
    nebula = {"enabled": True, "persistent_storage_path": slow, "persistent_time_interval": 1}
    engine = _engine(fast, nebula=nebula)
    found = engine.resumed_from, engine.global_steps
    engine.destroy()
    return found


def test_the_persistent_tier_is_looked_into_where_the_fast_one_is_empty(tmp_path: Path) -> None:
    run_ranks(_script, 1, str(tmp_path / "slow"), 4)
    (found,) = run_ranks(_tiers, 1, str(tmp_path / "fast"), str(tmp_path / "slow"))
    assert found == (str(tmp_path / "slow" / "global_step4"), 4)


def _node_local(rank: int, world_size: int, folder: str, steps: int) -> int:
    engine = _engine(folder, checkpoint={"use_node_local_storage": True})
    first = engine.global_steps
    feed = iter(RepeatingLoader(engine.training_dataloader))
    for _ in range(steps * engine.gradient_accumulation_steps()):
        inputs, targets, _read = next(feed)
        engine.backward(engine(inputs, targets))
        engine.step()
    engine.save_checkpoint(folder)
    engine.destroy()
    return first


def test_nodes_that_keep_their_own_checkpoints_go_on_from_them(tmp_path: Path) -> None:
    assert run_ranks(_node_local, 2, str(tmp_path), 2) == [0, 0]
    assert run_ranks(_node_local, 2, str(tmp_path), 1) == [2, 2]
    assert run_ranks(_node_local, 2, str(tmp_path), 1) == [3, 3]
