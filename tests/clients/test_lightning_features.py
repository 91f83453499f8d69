"""What else a Lightning run at ZeRO stage 3 uses: the summary, logged rates, recomputed activations, manual optimization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelSummary
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_summary import DeepSpeedSummary
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

import deepspeed
from tests.support.clients import assert_same_curve
from tests.support.lightning_runs import DeepSpeedOnCpu, Net, Regression, loader, trainer
from tests.support.ranks import run_ranks

Told = dict[str, Any]
PARAMETERS = sum(param.numel() for param in Net().parameters())


class _Recomputing(Regression):
    """The hidden layer's activations are made again in backward."""

    def forward(self, rows_BF: Tensor) -> Tensor:
        assert self.net is not None
        hidden_BH = deepspeed.checkpointing.checkpoint(self.net.hidden, rows_BF)
        return self.net.out(torch.tanh(self.net.norm(hidden_BH)))


class _Manual(Regression):
    """Manual optimization, as Lightning's page on it has it; without a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()["optimizer"]


class _Built(Regression):
    """Its module is made in the constructor, before any strategy is there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = Net()


def _fit(strategy: Any, world_size: int, model: Regression, **settings: Any) -> list[float]:
    trainer(strategy, world_size, **settings).fit(model, loader())
    return model.losses


def _summary(world_size: int, threshold: int) -> Told:
    model = Regression()
    zero = {"stage": 3, "stage3_param_persistence_threshold": threshold}
    strategy = DeepSpeedOnCpu(config={"zero_optimization": zero, "zero_allow_untested_optimizer": True})
    run = trainer(strategy, world_size, callbacks=[ModelSummary()], enable_model_summary=True)
    run.fit(model, loader(), loader(seed=1))
    facts = DeepSpeedSummary(model)
    return {"total": facts.total_parameters, "trained": facts.trainable_parameters, "here": facts.parameters_per_layer}


def _logged(world_size: int, folder: Path) -> tuple[list[float], list[float]]:
    """Losses, and the rates in the file that rank 0 writes."""
    logger = CSVLogger(folder)
    callbacks = [LearningRateMonitor(logging_interval="step")]
    losses = _fit("deepspeed_stage_3", world_size, Regression(), logger=logger, callbacks=callbacks)
    if rank_zero_only.rank > 0:
        return losses, []
    lines = [line.split(",") for line in (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()]
    column = lines[0].index("lr-SGD")
    return losses, [float(line[column]) for line in lines[1:] if line[column]]


def _fits_on(strategy: str, world_size: int) -> Told:
    """Two epochs, a validation, and the third epoch with the same trainer, which makes a new optimizer for it."""
    model = Regression()
    run = trainer(strategy, world_size)
    run.fit(model, loader())
    run.validate(model, loader(seed=1))
    run.fit_loop.max_epochs = 3
    run.fit(model, loader())
    return {"losses": model.losses, "validation": model.validation, "rates": model.rates}


def _runs(rank: int, world_size: int, folder: Path) -> Told:
    told: Told = {"ddp": _fit("ddp", world_size, Regression())}
    told["built"] = _fit("deepspeed_stage_3", world_size, _Built())
    for placed in ("partition_activations", "cpu_checkpointing"):
        told[placed] = _fit(DeepSpeedOnCpu(stage=3, **{placed: True}), world_size, _Recomputing())
    told["ddp, manual"] = _fit("ddp", world_size, _Manual())
    told["manual"] = _fit("deepspeed_stage_2", world_size, _Manual())
    told["fits again"] = [_fit("deepspeed_stage_3", world_size, Regression()) for _ in range(2)]
    told |= {f"{name}, fitted on": _fits_on(name, world_size) for name in ("ddp", "deepspeed_stage_3")}
    told["summary"] = {threshold: _summary(world_size, threshold) for threshold in (10, 1000)}
    told["logged"], told["rates"] = _logged(world_size, folder)
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    return run_ranks(_runs, 2, tmp_path_factory.mktemp("runs"), init=False, timeout_seconds=150)


def _assert_same(told: list[Told], name: str, reference: str) -> None:
    for each in told:
        assert_same_curve(each[name], each[reference])


def test_modules_built_before_the_strategy_are_sharded_too(told: list[Told]) -> None:
    _assert_same(told, "built", "ddp")


@pytest.mark.parametrize("placed", ["partition_activations", "cpu_checkpointing"])
def test_recomputed_activations_give_the_same_gradients(told: list[Told], placed: str) -> None:
    _assert_same(told, placed, "ddp")


def test_manual_optimization_trains_what_ddp_trains(told: list[Told]) -> None:
    _assert_same(told, "manual", "ddp, manual")


def test_one_process_trains_several_times(told: list[Told]) -> None:
    for each in told:
        for losses in each["fits again"]:
            assert_same_curve(losses, each["ddp"])


def test_a_trainer_validates_and_fits_on(told: list[Told]) -> None:
    """Lightning wipes all hooks in between and makes a new engine each time."""
    for each in told:
        ours, theirs = each["deepspeed_stage_3, fitted on"], each["ddp, fitted on"]
        assert_same_curve(ours["losses"], theirs["losses"])
        assert_same_curve(ours["validation"], theirs["validation"])
        assert ours["rates"] == theirs["rates"]
        assert len(ours["losses"]) == 3 * len(each["ddp"]) // 2


@pytest.mark.parametrize("threshold", [10, 1000])
def test_the_summary_counts_whole_parameters_and_what_this_rank_has(told: list[Told], threshold: int) -> None:
    """Those below the threshold stay whole; of the others this rank has a part, padding aside."""
    for summary in (each["summary"][threshold] for each in told):
        assert summary["total"] == summary["trained"] == PARAMETERS
        kept, here = sum(p.numel() for p in Net().parameters() if p.numel() <= threshold), sum(summary["here"])
        assert kept <= here <= PARAMETERS
        assert (here < PARAMETERS) == (threshold == 10)


def test_rates_are_logged(told: list[Told]) -> None:
    """By rank 0, and the run is that of a trainer that logs nothing."""
    _assert_same(told, "logged", "ddp")
    rates, of_others = (each["rates"] for each in told)
    assert rates[0] == 0.2
    assert sorted(set(rates), reverse=True) == [0.2, 0.1, 0.05][: len(set(rates))]
    assert len(set(rates)) > 1
    assert of_others == []
