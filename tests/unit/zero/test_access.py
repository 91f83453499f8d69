"""What clients read and write of one parameter, on one rank; several are in tests/ranks/test_access.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed import utils
from deepspeed.comm.algorithms import LocalReducer
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.precision.loss_scaler import NullScaler
from deepspeed.zero.gradients import ViewGradients, WholeGradients
from deepspeed.zero.master import MasterWeights
from deepspeed.zero.optimizer import ZeroOptimizer
from deepspeed.zero.reducer import GradientReducer
from tests.support.fake_reducers import pretend_axis
from tests.support.flat_groups import CPU, flat_group

READERS: dict[str, Callable[[nn.Parameter], Tensor | None]] = {
    "full weight": utils.safe_get_full_fp32_param,
    "full gradient": utils.safe_get_full_grad,
    "full state": lambda p: utils.safe_get_full_optimizer_state(p, "exp_avg"),
    "local weight": utils.safe_get_local_fp32_param,
    "local gradient": utils.safe_get_local_grad,
    "local state": lambda p: utils.safe_get_local_optimizer_state(p, "exp_avg"),
}
WRITERS: dict[str, Callable[[nn.Parameter, Tensor], None]] = {
    "full weight": utils.safe_set_full_fp32_param,
    "full gradient": utils.safe_set_full_grad,
    "full state": lambda p, value: utils.safe_set_full_optimizer_state(p, value, "exp_avg"),
    "local weight": utils.safe_set_local_fp32_param,
    "local gradient": utils.safe_set_local_grad,
    "local state": lambda p, value: utils.safe_set_local_optimizer_state(p, value, "exp_avg"),
}


class Trained:
    """A bf16 model with fp32 masters after one update and one more backward."""

    def __init__(self, *, keeps: bool = True, divisor: int = 1) -> None:
        self.module = nn.ParameterDict({"w": nn.Parameter(torch.ones(5, 3)), "empty": nn.Parameter(torch.ones(0, 2))})
        client = torch.optim.AdamW(self.module.parameters(), lr=0.01)
        self.flat = flat_group(self.module, dtype=torch.bfloat16)
        buffer = LocalReducer(self.flat.layout.numel, torch.bfloat16 if keeps else torch.float32, CPU)
        store = ViewGradients(self.flat, buffer) if keeps else WholeGradients(self.flat, buffer, is_scattered=False)
        self.flat.attach_gradients(store)
        reducer = GradientReducer([self.flat], pretend_axis(1), is_boundary=lambda: True)
        master = MasterWeights([self.flat], client, is_elementwise=True, sub_group_numel=4)  # state in several slices
        self.optimizer: Any = ZeroOptimizer(master, reducer, NullScaler(), divisor=lambda: divisor)
        self.backward()
        self.optimizer.update(1)
        self.backward()

    @property
    def w(self) -> nn.Parameter:
        return self.module.get_parameter("w")

    def backward(self) -> None:
        (self.w.sum() * 2).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("what", WRITERS)
@pytest.mark.parametrize("keeps", [True, False])
def test_what_was_written_is_read_and_the_copies_are_the_callers(what: str, keeps: bool) -> None:
    trained = Trained(keeps=keeps, divisor=2)
    value = torch.arange(15.0).view(5, 3) / 8
    value = value.view(-1) if what.startswith("local") else value
    WRITERS[what](trained.w, value)
    got = READERS[what](trained.w)
    assert got is not None
    assert got.dtype == torch.float32
    assert torch.equal(got, value)
    got.zero_()
    assert torch.equal(READERS[what](trained.w), value)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["full weight", "local weight"])
def test_a_written_weight_is_the_models_too_and_keeps_what_sixteen_bits_round_away(what: str) -> None:
    trained = Trained()
    value = torch.full((5, 3), 1.0 + 2.0**-10)
    WRITERS[what](trained.w, value.view(-1) if what.startswith("local") else value)
    assert torch.equal(trained.w, value.bfloat16())
    trained.flat.adopt_edits()
    assert torch.equal(utils.safe_get_full_fp32_param(trained.w), value)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["full weight", "local weight"])
def test_a_weight_that_was_edited_in_the_model_is_read_with_the_edit(what: str) -> None:
    trained = Trained()
    with torch.no_grad():
        trained.w[1] = 0.25
    got = READERS[what](trained.w)
    assert got is not None
    assert torch.equal(got.view(5, 3)[1], torch.full((3,), 0.25))
    assert not torch.equal(got.view(5, 3)[0].bfloat16().float(), got.view(5, 3)[0])  # the rest keeps its digits


def test_gradients_are_in_the_units_of_the_mean_loss() -> None:
    trained = Trained(divisor=4)
    assert torch.equal(utils.safe_get_full_grad(trained.w), torch.full((5, 3), 2.0 / 4))  # type: ignore[arg-type]


def test_an_edited_param_grad_is_what_is_read() -> None:
    trained = Trained()
    trained.w.grad = torch.full((5, 3), 3.0, dtype=torch.bfloat16)
    assert torch.equal(utils.safe_get_full_grad(trained.w), torch.full((5, 3), 3.0))  # type: ignore[arg-type]
    trained.module.zero_grad()
    assert utils.safe_get_full_grad(trained.w) is None


def test_gradients_of_a_store_of_its_own_are_there_from_backward_to_update_alone() -> None:
    trained = Trained(keeps=False)
    assert utils.safe_get_full_grad(trained.w) is not None
    trained.optimizer.update(2)
    assert utils.safe_get_full_grad(trained.w) is None
    assert utils.safe_get_local_grad(trained.w) is None


def test_a_parameter_without_elements_reads_empty_and_takes_nothing() -> None:
    trained = Trained()
    empty = trained.module.get_parameter("empty")
    assert utils.safe_get_full_fp32_param(empty).shape == (0, 2)  # type: ignore[union-attr]
    assert utils.safe_get_local_fp32_param(empty).shape == (0,)  # type: ignore[union-attr]
    assert utils.safe_get_full_optimizer_state(empty, "exp_avg") is None
    utils.safe_set_full_fp32_param(empty, torch.zeros(0, 2))
    utils.safe_set_local_fp32_param(empty, torch.zeros(0))


@pytest.mark.parametrize("what", WRITERS)
def test_values_of_another_size_are_refused(what: str) -> None:
    trained = Trained()
    with pytest.raises(ArgumentError, match=r"shape|elements"):
        WRITERS[what](trained.w, torch.ones(4))


@pytest.mark.parametrize("what", WRITERS)
def test_what_no_engine_trains_has_nothing_to_read_and_takes_nothing(what: str) -> None:
    trained = Trained()
    trained.optimizer.release()
    for stranger in (nn.Parameter(torch.ones(2)), trained.w):
        assert READERS[what](stranger) is None
        with pytest.raises(UsageError, match="no engine trains"):
            WRITERS[what](stranger, torch.ones_like(stranger))


def test_gradients_are_updated_where_there_are_any() -> None:
    trained = Trained()
    stranger = nn.Parameter(torch.ones(2))
    utils.safe_update_full_grad_vectorized([trained.w, stranger], lambda gradient, param: gradient * 3)
    assert torch.equal(utils.safe_get_full_grad(trained.w), torch.full((5, 3), 6.0))  # type: ignore[arg-type]
    assert stranger.grad is None
