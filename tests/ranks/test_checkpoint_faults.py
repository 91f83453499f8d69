"""Faults that were found in saving and loading through the engine, each as the behaviour that is right."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.errors import ArgumentError, CheckpointError
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.support.engines import config, make_engine, zero
from tests.support.ranks import run_ranks


class Counting(nn.Module):
    """Two layers, one buffer under two names, and a count that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 1)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("also_seen", self.seen)
        self.count: dict[str, Any] = {"calls": 0}

    def get_extra_state(self) -> dict[str, Any]:
        return self.count

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.count = state

    def forward(self, rows: Tensor) -> Tensor:
        self.count["calls"] += 1
        return self.second(torch.tanh(self.first(rows))).pow(2).mean()


class SlashAdagrad(torch.optim.Optimizer):
    """An optimizer that keeps its sum under a name with a slash."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    total = self.state[param].setdefault("squares/all of them", torch.zeros_like(param))
                    total.add_(param.grad.pow(2))
                    param.sub_(group["lr"] * param.grad / (total.sqrt() + 1e-3))


ROWS = torch.linspace(-1, 1, 8).view(2, 4)


def _engine(optimizer: Any = None, stage: int = 1, **blocks: Any) -> Any:
    model = Counting()
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    return make_engine(
        model, config(rows=2, **zero(stage), **blocks), optimizer=adam if optimizer is None else optimizer(model)
    )


def _step(engine: Any) -> float:
    loss = engine(ROWS)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _go_on(optimizer: Any, folder: Path) -> tuple[list[float], list[float]]:
    """Losses of an uninterrupted run behind a save, and of one that was resumed there."""
    engine = _engine(optimizer)
    _step(engine)
    engine.save_checkpoint(folder)
    whole = [_step(engine) for _ in range(3)]
    engine.destroy()
    again = _engine(optimizer)
    again.load_checkpoint(folder)
    return whole, [_step(again) for _ in range(3)]


def test_what_modules_keep_besides_tensors_comes_back(tmp_path: Path) -> None:
    engine = _engine()
    _step(engine)
    engine.save_checkpoint(tmp_path)
    _step(engine)
    engine.load_checkpoint(tmp_path, load_module_only=True)
    assert engine.module.count == {"calls": 1}


def test_an_optimizer_may_name_its_state_with_a_slash(tmp_path: Path) -> None:
    whole, resumed = _go_on(lambda model: SlashAdagrad(model.parameters()), tmp_path)
    assert resumed == whole


def test_a_tag_may_be_a_number(tmp_path: Path) -> None:
    engine = _engine()
    engine.save_checkpoint(tmp_path, tag=5)
    path, _ = engine.load_checkpoint(tmp_path, tag=5)
    assert path == str(tmp_path / "5")


def test_a_buffer_under_two_names_is_exported_under_both(tmp_path: Path) -> None:
    _engine().save_checkpoint(tmp_path)
    state_dict = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    missing, unexpected = Counting().load_state_dict(state_dict, strict=False)
    assert (missing, unexpected) == (["_extra_state"], [])


def test_a_load_that_is_refused_for_the_optimizer_changes_no_weight(tmp_path: Path) -> None:
    _engine().save_checkpoint(tmp_path)
    engine = _engine(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    _step(engine)
    before = copy.deepcopy(engine.module.state_dict())
    with pytest.raises(CheckpointError, match="holds the state of AdamW"):
        engine.load_checkpoint(tmp_path)
    after = engine.module.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in ("first.weight", "second.bias"))
    assert engine.global_steps == 1


@pytest.mark.parametrize("state", [[1, 2], "abc", 5])
def test_a_client_state_that_is_no_dict_is_refused_with_a_cure(state: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"a dict is needed\. Give your values under names"):
        _engine().save_checkpoint(tmp_path, client_state=state)
    assert not any(tmp_path.iterdir())


def test_training_goes_on_after_a_load_in_inference_mode(tmp_path: Path) -> None:
    engine = _engine()
    _step(engine)
    engine.save_checkpoint(tmp_path)
    wanted = _step(engine)
    with torch.inference_mode():
        engine.load_checkpoint(tmp_path)
    assert _step(engine) == wanted
    _step(engine)


def test_a_save_between_two_updates_warns_that_gradients_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = _engine(gradient_accumulation_steps=2)
    with caplog.at_level(logging.WARNING, "DeepSpeed"):
        _step(engine)
        _step(engine)
        engine.save_checkpoint(tmp_path)
        assert "not saved" not in caplog.text
        _step(engine)
        engine.save_checkpoint(tmp_path)
    assert "gradients of the micro-batches since the last update are not saved" in caplog.text


def _two_groups(model: Counting, *, first_is_first: bool) -> torch.optim.Optimizer:
    groups = [{"params": model.first.parameters(), "lr": 0.05}, {"params": model.second.parameters(), "lr": 0.001}]
    return torch.optim.AdamW(groups if first_is_first else groups[::-1])


def test_hyperparameters_follow_the_parameters_when_groups_change_places(tmp_path: Path) -> None:
    engine = _engine(lambda model: _two_groups(model, first_is_first=True))
    _step(engine)
    engine.save_checkpoint(tmp_path)
    wanted = [_step(engine) for _ in range(2)]
    engine.destroy()
    turned = _engine(lambda model: _two_groups(model, first_is_first=False))
    turned.load_checkpoint(tmp_path)
    assert [group["lr"] for group in turned.optimizer.param_groups] == [0.001, 0.05]
    assert [_step(turned) for _ in range(2)] == pytest.approx(wanted, rel=1e-6)


class FailingSchedule:
    """A client's schedule that cannot say its state."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no state today")


def _save_with_a_failing_schedule(rank: int, world_size: int, folder: str) -> str:
    engine = _engine()
    engine.lr_scheduler = FailingSchedule(engine.optimizer)
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder)
    return str(caught.value)


def test_a_state_that_fails_on_one_rank_is_the_same_error_on_all(tmp_path: Path) -> None:
    texts = run_ranks(_save_with_a_failing_schedule, 2, str(tmp_path))
    assert texts == ["rank 0: RuntimeError: no state today"] * 2
