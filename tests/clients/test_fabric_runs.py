"""Lightning Fabric with the strategies `deepspeed_*`: training, saving, loading, modules made in shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

import deepspeed
from tests.support.clients import assert_same_curve
from tests.support.lightning_runs import FabricDeepSpeedOnCpu, Net, loader, use_strategies_on_cpu
from tests.support.ranks import run_ranks

STAGES = ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
EPOCHS = 2
Told = dict[str, Any]


def _fabric(strategy: Any, world_size: int) -> Fabric:
    use_strategies_on_cpu()
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    return fabric


def _set_up(fabric: Fabric, *, with_schedule: bool = False) -> tuple[Any, Any, Any]:
    """The module made inside `init_module`: in shards at stage 3."""
    with fabric.init_module():
        torch.manual_seed(7)
        net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if not with_schedule:
        return *fabric.setup(net, optimizer), None
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    return fabric.setup(net, optimizer, scheduler=schedule)


def _train(fabric: Fabric, model: Any, optimizer: Any, epochs: int = EPOCHS, schedule: Any = None) -> list[float]:
    batches = fabric.setup_dataloaders(loader())
    losses = []
    for _ in range(epochs):
        for rows_BF, targets_B1 in batches:
            loss = nn.functional.mse_loss(model(rows_BF), targets_B1)
            fabric.backward(loss, model=model)
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
            losses.append(loss.item())
    return losses


def _clip(fabric: Fabric, model: Any, optimizer: Any) -> str:
    """What the client says: it leaves clipping to the configuration."""
    try:
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
    except NotImplementedError as error:
        return str(error)
    return ""


def _plain_weights(world_size: int, path: Path, model: Any) -> dict[str, Tensor]:
    """The whole weights, on all ranks."""
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: value.detach().clone() for name, value in model.module.state_dict().items()}


def _one(name: str, world_size: int, folder: Path) -> Told:
    fabric = _fabric(name, world_size)
    model, optimizer, _ = _set_up(fabric)
    told: Told = {"losses": _train(fabric, model, optimizer)}
    counters = {"epoch": EPOCHS, "best": float("inf"), "rng": torch.get_rng_state(), "names": ("a", 2)}
    fabric.save(folder / name, {"model": model, "optimizer": optimizer, **counters})
    told["weights"] = _plain_weights(world_size, folder, model)
    told["after"] = _train(fabric, model, optimizer, 1)
    if name != "ddp":
        told["clip"] = _clip(fabric, model, optimizer)

    again, its_optimizer, _ = _set_up(fabric)
    state: Told = {"model": again, "optimizer": its_optimizer, "epoch": 0, "best": 0.0, "names": ()}
    told["rest"] = sorted(fabric.load(folder / name, state))
    told["state"] = {key: state[key] for key in ("epoch", "best", "names")}
    told["resumed"] = _train(fabric, again, its_optimizer, 1)
    return told


def _clipped(strategy: Any, world_size: int) -> list[float]:
    fabric = _fabric(strategy, world_size)
    model, optimizer, _ = _set_up(fabric)
    if strategy != "ddp":
        return _train(fabric, model, optimizer)
    losses = []
    for _ in range(EPOCHS):
        for rows_BF, targets_B1 in fabric.setup_dataloaders(loader()):
            loss = nn.functional.mse_loss(model(rows_BF), targets_B1)
            fabric.backward(loss, model=model)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def _scheduled(name: str, world_size: int) -> list[float]:
    fabric = _fabric(name, world_size)
    if name == "ddp":  # it takes no schedule
        model, optimizer, _ = _set_up(fabric)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
        return _train(fabric, model, optimizer, schedule=schedule)
    model, optimizer, _ = _set_up(fabric, with_schedule=True)
    return _train(fabric, model, optimizer)  # the engine steps it


def _raw(world_size: int, folder: Path) -> Told:
    """A file of plain weights, loaded before the module is set up."""
    fabric = _fabric(FabricDeepSpeedOnCpu(stage=3, load_full_weights=True), world_size)
    if fabric.global_rank == 0:
        torch.manual_seed(3)
        torch.save(Net().state_dict(), folder / "plain.pt")
    fabric.barrier()
    plain = Net()
    fabric.load_raw(folder / "plain.pt", plain)
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    model, _ = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    return {"expected": expected, "set up": _plain_weights(world_size, folder, model)}


def _runs(rank: int, world_size: int, folder: Path) -> Told:
    told: Told = {name: _one(name, world_size, folder) for name in ("ddp", *STAGES)}
    told["ddp, clipped"] = _clipped("ddp", world_size)
    config = {"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5}
    told["clipped"] = _clipped(FabricDeepSpeedOnCpu(config=config), world_size)
    told |= {f"{name}, scheduled": _scheduled(name, world_size) for name in ("ddp", "deepspeed_stage_2")}
    told["raw"] = _raw(world_size, folder)
    return told


@pytest.fixture(scope="module", params=[2, 1])
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    folder = tmp_path_factory.mktemp("fabric")
    return run_ranks(_runs, request.param, folder, init=False, timeout_seconds=150)


@pytest.mark.parametrize("name", STAGES)
def test_each_stage_trains_what_ddp_trains(told: list[Told], name: str) -> None:
    for each in told:
        assert_same_curve(each[name]["losses"], each["ddp"]["losses"])
        for key, value in each["ddp"]["weights"].items():
            torch.testing.assert_close(each[name]["weights"][key], value, rtol=0, atol=1e-5)
        assert_same_curve(each[name]["after"], each["ddp"]["after"])


@pytest.mark.parametrize("name", STAGES)
def test_what_was_saved_goes_on(told: list[Told], name: str) -> None:
    for each in told:
        assert_same_curve(each[name]["resumed"], each[name]["after"], tolerance=0)
        assert each[name]["state"] == {"epoch": EPOCHS, "best": float("inf"), "names": ("a", 2)}
        assert each[name]["state"] == each["ddp"]["state"]
        assert each[name]["rest"] == each["ddp"]["rest"] == ["rng"]


def test_clipping_is_the_configurations(told: list[Told]) -> None:
    for each in told:
        assert all("gradient_clipping" in each[name]["clip"] for name in STAGES)
        assert_same_curve(each["clipped"], each["ddp, clipped"])


def test_a_schedule_set_up_with_the_module_is_stepped_by_the_engine(told: list[Told]) -> None:
    for each in told:
        assert_same_curve(each["deepspeed_stage_2, scheduled"], each["ddp, scheduled"])


def test_files_of_plain_weights_reach_every_rank(told: list[Told]) -> None:
    for each in told:
        for key, value in told[0]["raw"]["expected"].items():
            assert torch.equal(each["raw"]["set up"][key], value)
