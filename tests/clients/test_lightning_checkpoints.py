"""What Lightning saves through us comes back: into a run, an evaluation, another number of ranks, a plain module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch import Tensor

from tests.support.clients import assert_same_curve
from tests.support.lightning_runs import DeepSpeedOnCpu, Regression, loader, rows, trainer
from tests.support.ranks import run_ranks

EPOCHS = 3
STAGES = ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
Told = dict[str, Any]


def _keeper(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)


def _train_and_save(name: str, world_size: int, folder: Path) -> Told:
    """Three epochs; the best two are kept, and the last."""
    model, keeper = Regression(), _keeper(folder)
    run = trainer(name, world_size, max_epochs=EPOCHS, callbacks=[keeper], enable_checkpointing=True)
    run.fit(model, loader(), loader(seed=1))
    run.save_checkpoint(folder / "by-hand")
    return {"losses": model.losses, "validation": model.validation, "kept": sorted(p.name for p in folder.iterdir())}


def _resume(name: str, world_size: int, folder: Path, path: Path) -> Told:
    """Two more epochs from what `path` holds, in a fresh trainer with a fresh module."""
    model, keeper = Regression(), _keeper(folder)
    run = trainer(name, world_size, max_epochs=EPOCHS + 2, callbacks=[keeper], enable_checkpointing=True)
    run.fit(model, loader(), loader(seed=1), ckpt_path=path)
    best = {Path(kept).name: float(score) for kept, score in keeper.best_k_models.items()}
    return {"losses": model.losses, "rates": model.rates, "step": run.global_step, "best": best}


def _evaluate(name: str, world_size: int, path: Path) -> Told:
    """Validation, test and predictions of a fresh module, without an optimizer."""
    found: Told = {}
    for kind in ("validate", "test"):
        model = Regression()
        getattr(trainer(name, world_size), kind)(model, loader(seed=1), ckpt_path=path)
        found[kind] = model.validation
    found["predict"] = trainer(name, world_size).predict(Regression(), loader(seed=1), ckpt_path=path)
    return found


def _runs_of_two_ranks(rank: int, world_size: int, folder: Path) -> Told:
    told: Told = {}
    for name in ("ddp", *STAGES):
        saved = folder / name
        told[name] = _train_and_save(name, world_size, saved)
        told[f"{name}, resumed"] = _resume(name, world_size, saved, saved / "last.ckpt")
        told[f"{name}, evaluated"] = _evaluate(name, world_size, saved / "by-hand")
    told["across stages"] = _resume("deepspeed_stage_3", world_size, folder / "across", folder / STAGES[0] / "by-hand")
    return told


def _runs_of_one_rank(rank: int, world_size: int, folder: Path) -> Told:
    return {name: _resume(name, world_size, folder / name, folder / name / "by-hand") for name in ("ddp", *STAGES)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def told(folder: Path) -> list[Told]:
    return run_ranks(_runs_of_two_ranks, 2, folder, init=False, timeout_seconds=150)


def _assert_same_resume(ours: Told, theirs: Told) -> None:
    assert_same_curve(ours["losses"], theirs["losses"])
    assert ours["rates"] == theirs["rates"]
    assert ours["step"] == theirs["step"]
    assert ours["best"] == pytest.approx(theirs["best"], abs=1e-5)
    assert len(ours["best"]) == 2


@pytest.mark.parametrize("name", STAGES)
def test_a_run_goes_on_where_it_was_saved(told: list[Told], name: str) -> None:
    for each in told:
        assert_same_curve(each[name]["losses"], each["ddp"]["losses"])
        assert_same_curve(each[name]["validation"], each["ddp"]["validation"])
        _assert_same_resume(each[f"{name}, resumed"], each["ddp, resumed"])
        assert each["ddp, resumed"]["step"] == (EPOCHS + 2) * len(rows()) // (4 * 2)


@pytest.mark.parametrize("name", STAGES)
def test_the_best_and_the_last_are_kept(told: list[Told], name: str) -> None:
    """`save_top_k` removes folders as it removes files of ddp."""
    for each in told:
        assert each[name]["kept"] == each["ddp"]["kept"]
        assert "last.ckpt" in each[name]["kept"]


@pytest.mark.parametrize("name", STAGES)
def test_evaluations_need_no_optimizer(told: list[Told], name: str) -> None:
    for each in told:
        last_epoch = each[name]["validation"][-len(rows()) // 8 :]
        ours, theirs = each[f"{name}, evaluated"], each["ddp, evaluated"]
        assert_same_curve(ours["validate"], last_epoch)
        for kind in ("validate", "test"):
            assert_same_curve(ours[kind], theirs[kind])
        assert ours["test"] == ours["validate"]
        for mine, other in zip(ours["predict"], theirs["predict"], strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


def test_a_run_goes_on_at_another_stage(told: list[Told]) -> None:
    """From what was saved by hand, without the record of what was best in its own folder."""
    for each in told:
        ours, theirs = each["across stages"], each["ddp, resumed"]
        assert_same_curve(ours["losses"], theirs["losses"])
        assert (ours["rates"], ours["step"]) == (theirs["rates"], theirs["step"])


def test_a_run_goes_on_with_another_number_of_ranks(told: list[Told], folder: Path) -> None:
    found = run_ranks(_runs_of_one_rank, 1, folder, init=False, timeout_seconds=100)[0]
    for name in STAGES:
        _assert_same_resume(found[name], found["ddp"])


@pytest.mark.parametrize("name", STAGES)
def test_lightnings_own_tool_makes_one_file_that_a_plain_module_loads(
    told: list[Told], folder: Path, tmp_path: Path, name: str
) -> None:
    """Hyperparameters, callbacks and loops are in it, as in a checkpoint of ddp, and nothing of ours."""
    convert_zero_checkpoint_to_fp32_state_dict(folder / name / "by-hand", tmp_path / "one.ckpt")
    one = torch.load(tmp_path / "one.ckpt", weights_only=False)
    ddp = torch.load(folder / "ddp" / "by-hand", weights_only=False)
    assert set(ddp) - set(one) == {"optimizer_states"}
    assert not set(one) - set(ddp)
    assert one["hyper_parameters"] == ddp["hyper_parameters"]
    assert one["global_step"] == ddp["global_step"]
    model = Regression.load_from_checkpoint(tmp_path / "one.ckpt", map_location="cpu")
    _assert_same_weights(model.state_dict(), ddp["state_dict"])


def _assert_same_weights(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=0, atol=1e-5)


def _evaluate_one_file(rank: int, world_size: int, path: Path) -> list[float]:
    model = Regression()
    strategy = DeepSpeedOnCpu(stage=3, load_full_weights=True)
    trainer(strategy, world_size).validate(model, loader(seed=1), ckpt_path=path)
    return model.validation


def test_one_file_goes_into_sharded_modules(told: list[Told], folder: Path) -> None:
    """`load_full_weights=True`: rank 0's values are handed to all ranks' shards."""
    found = run_ranks(_evaluate_one_file, 2, folder / "ddp" / "by-hand", init=False, timeout_seconds=100)
    for validation, each in zip(found, told, strict=True):
        assert_same_curve(validation, each["ddp, evaluated"]["validate"])
