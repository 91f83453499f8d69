"""The two optimizers of ZenFlow."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from deepspeed.errors import ArgumentError
from deepspeed.ops.adam import (
    DeepSpeedCPUAdam,
    FusedAdam,
    ZenFlowCPUAdam,
    ZenFlowSelectiveAdamW,
    ZenFlowSelectiveAdamW_stage3,
)


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


# -- the important elements -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"bucket_size": 1}, {"adam_w_mode": False}])
def test_chosen_columns_are_stepped_as_if_they_were_all_there_is(options: dict[str, object]) -> None:
    shapes = [(4, 6), (3, 2, 3), (5,)]
    columns = {0: torch.tensor([4, 1]), 1: torch.tensor([0, 5, 3])}
    ours, whole = parameters(*shapes), parameters(*shapes)
    selective = ZenFlowSelectiveAdamW(ours, lr=0.1, weight_decay=0.2, **options)  # type: ignore[arg-type]
    for number, chosen in columns.items():
        selective.select(ours[number], chosen)
    dense = FusedAdam(whole, lr=0.1, weight_decay=0.2, adam_w_mode=bool(options.get("adam_w_mode", True)))
    start = [p.detach().clone() for p in ours]
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(whole, step)
        selective.step()
        dense.step()
    for number, (p, want, before) in enumerate(zip(ours, whole, start, strict=True)):
        stays = torch.ones(p.numel(), dtype=torch.bool).view(p.shape[0], -1)
        stays[:, columns.get(number, slice(None))] = False
        torch.testing.assert_close(p.detach(), torch.where(stays.view(p.shape), before, want.detach()), rtol=0, atol=0)


def test_moments_exist_for_the_chosen_elements_alone_and_stay_when_those_stay() -> None:
    (p,) = parameters((4, 6))
    optimizer = ZenFlowSelectiveAdamW([p])
    optimizer.select(p, torch.tensor([1, 4]))
    give_gradients([p], 0)
    optimizer.step()
    before = optimizer.state[p]["exp_avg"].view(4, 2).clone()
    optimizer.select(p, torch.tensor([4, 5]))
    after = optimizer.state[p]["exp_avg"].view(4, 2)
    assert torch.equal(after[:, 0], before[:, 1])
    assert torch.equal(after[:, 1], torch.zeros(4))
    assert set(optimizer.state) == {p}


def test_state_and_choice_go_out_and_come_back() -> None:
    ours, others = parameters((4, 6), (3,)), parameters((4, 6), (3,))
    first, second = ZenFlowSelectiveAdamW(ours), ZenFlowSelectiveAdamW(others)
    first.select(ours[0], torch.tensor([1, 4]))
    for step in range(3):
        if step == 2:
            second.load_state_dict(first.state_dict())
            others[0].data.copy_(ours[0])
            others[1].data.copy_(ours[1])
            give_gradients(others, step)
            second.step()
        give_gradients(ours, step)
        first.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))


def test_a_shard_is_chosen_by_position() -> None:
    (p,) = parameters((10,))
    start = p.detach().clone()
    optimizer = ZenFlowSelectiveAdamW_stage3([p])
    optimizer.select(p, torch.tensor([9, 2]))
    give_gradients([p], 0)
    optimizer.step()
    assert (p.detach() != start).nonzero().view(-1).tolist() == [2, 9]
    positions = optimizer.positions(p)
    assert positions is not None
    assert positions.tolist() == [2, 9]


def test_gradients_may_come_from_elsewhere_in_another_precision() -> None:
    ours, want = parameters((3, 4)), parameters((3, 4))
    gradient = torch.randn(12, generator=torch.Generator().manual_seed(3)).bfloat16()
    ZenFlowSelectiveAdamW(ours).step_on({ours[0]: gradient}, factor=0.5)
    want[0].grad = (gradient.float() * 0.5).view(3, 4)
    ZenFlowSelectiveAdamW(want).step()
    assert torch.equal(ours[0], want[0])


def test_a_parameter_that_is_not_contiguous_is_updated_in_place() -> None:
    whole, (want,) = torch.randn(6, 4), parameters((1,))
    p, want = nn.Parameter(whole.t()), nn.Parameter(whole.t().clone())
    for each in (p, want):
        optimizer = ZenFlowSelectiveAdamW([each])
        optimizer.select(each, torch.tensor([0, 3]))
        give_gradients([each], 0)
        optimizer.step()
    assert torch.equal(p, want)
    assert torch.equal(whole.t(), want)


@pytest.mark.parametrize(
    ("shape", "chosen", "match"),
    [
        ((4,), [0], "columns need two dimensions"),
        ((4, 3), [3], "numbers from 0 to 2"),
        ((4, 3), [-1], "numbers from 0 to 2"),
        ((4, 3), [[0]], "1-D tensor"),
    ],
)
def test_columns_that_do_not_exist_are_refused(shape: tuple[int, ...], chosen: list[int], match: str) -> None:
    (p,) = parameters(shape)
    with pytest.raises(ArgumentError, match=match):
        ZenFlowSelectiveAdamW([p]).select(p, torch.tensor(chosen))


def test_a_bucket_without_room_is_refused() -> None:
    with pytest.raises(ArgumentError, match="bucket_size=0"):
        ZenFlowSelectiveAdamW(parameters((2,)), bucket_size=0)


# -- the rest ---------------------------------------------------------------------------------------------------------


def run(optimizer: DeepSpeedCPUAdam, params: list[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
    for step in range(5):
        give_gradients(params, step)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.step()
        if isinstance(optimizer, ZenFlowCPUAdam):
            optimizer.param_groups[0]["lr"] = 1e9  # belongs to no step any more
            optimizer.wait()
    return [p.detach() for p in params], [optimizer.state[p]["exp_avg"] for p in params]


@pytest.mark.parametrize("overlap_step", [False, True])
@pytest.mark.parametrize("adamw_mode", [False, True])
def test_a_step_behind_the_caller_gives_the_same_bits(overlap_step: bool, adamw_mode: bool) -> None:
    ours, plain = parameters((7, 3), (5,)), parameters((7, 3), (5,))
    options = {"weight_decay": 0.1, "adamw_mode": adamw_mode}
    optimizer = ZenFlowCPUAdam(ours, overlap_step=overlap_step, **options)
    try:
        got = run(optimizer, ours)
    finally:
        optimizer.close()
    for mine, theirs in zip(got, run(DeepSpeedCPUAdam(plain, **options), plain), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_the_caller_goes_on_while_the_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters((3,))
    may_step, ran_in = threading.Event(), []
    plain_step = DeepSpeedCPUAdam._step_groups

    def slow_step(self: DeepSpeedCPUAdam) -> None:
        assert may_step.wait(20)
        ran_in.append(threading.current_thread())
        plain_step(self)

    # Not `step`, which ZenFlowCPUAdam inherits: whether a patch of it reaches that class depends on torch's hooks.
    monkeypatch.setattr(DeepSpeedCPUAdam, "_step_groups", slow_step)
    optimizer = ZenFlowCPUAdam(params, overlap_step=True)
    try:
        start = params[0].detach().clone()
        give_gradients(params, 0)
        optimizer.step()
        assert torch.equal(params[0], start)
        may_step.set()
        optimizer.wait()
    finally:
        optimizer.close()
    assert not torch.equal(params[0], start)
    assert ran_in != [threading.current_thread()]


def test_an_error_of_the_thread_comes_out_of_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: DeepSpeedCPUAdam) -> None:
        raise RuntimeError("no step today")

    monkeypatch.setattr(DeepSpeedCPUAdam, "_step_groups", broken)
    optimizer = ZenFlowCPUAdam(parameters((3,)), overlap_step=True)
    try:
        optimizer.step()
        with pytest.raises(RuntimeError, match="no step today"):
            optimizer.wait()
    finally:
        optimizer.close()
