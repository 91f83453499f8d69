"""Our optimizers against torch's, against the papers' formulas, and in the places where memory and dtype matter."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.optimizer import GroupOptimizer

ADAMS = [FusedAdam, DeepSpeedCPUAdam]
ALL: list[Callable[..., GroupOptimizer]] = [*ADAMS, FusedLion, DeepSpeedCPULion, DeepSpeedCPUAdagrad, FusedLamb]
SHAPES = [(5, 3), (7,), (2, 2, 2), ()]


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def assert_equal(ours: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter], **tolerance: float) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), **(tolerance or {"rtol": 0, "atol": 0}))


FIVE_FP32_STEPS = {"rtol": 6e-7, "atol": 6e-7 * 0.05}
"""torch's kernels may contract to fused multiply-adds and correct biases elsewhere. Each of five steps rounds a parameter at
most twice otherwise, 6e-8 of what it was, which is at most five times a rate of 1e-2 from what it is; the update's own
roundings are a rate smaller."""


@pytest.mark.parametrize("kind", ADAMS)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adam_equals_torchs_fused_adam(kind: Any, decoupled: bool, dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    mode = {"adam_w_mode" if kind is FusedAdam else "adamw_mode": decoupled}
    train(kind(ours, **options, **mode), 5)
    reference = torch.optim.AdamW if decoupled else torch.optim.Adam
    train(reference(theirs, fused=True, **options), 5)
    assert_equal(ours, theirs, **({} if dtype == torch.float64 else FIVE_FP32_STEPS))


def test_adam_agrees_with_torchs_plain_loop() -> None:
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    train(FusedAdam(ours, lr=1e-2, weight_decay=0.1), 20)
    train(torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1, foreach=False), 20)
    # 20 steps of about 10 rounded operations each: 200 * 1.1e-16 relative to values of order 1.
    assert_equal(ours, theirs, rtol=3e-14, atol=3e-14)


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_without_bias_correction_follows_the_formula(decoupled: bool) -> None:
    (p, *_) = ours = parameters(torch.float64)
    want, m, v = p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p)
    optimizer = FusedAdam(ours, lr=1e-2, bias_correction=False, weight_decay=0.1, adam_w_mode=decoupled)
    for step in range(4):
        train(optimizer, 1, seed=step)
        grad = p.grad.clone() if decoupled else p.grad + 0.1 * want
        m = 0.9 * m + 0.1 * grad
        v = 0.999 * v + 0.001 * grad**2
        want = (want * (1 - 1e-3) if decoupled else want) - 1e-2 * m / (v.sqrt() + 1e-8)
        # fp64: some ten operations a step, written otherwise, each rounding at 1.1e-16.
        torch.testing.assert_close(p.detach(), want.detach(), rtol=1e-13, atol=1e-13)
    assert optimizer.state[p]["step"] == 4


def test_adam_keeps_the_documented_state() -> None:
    params = parameters()
    optimizer = FusedAdam(params)
    train(optimizer, 3)
    for p in params:
        assert set(optimizer.state[p]) == {"exp_avg", "exp_avg_sq", "step"}
        assert optimizer.state[p]["exp_avg"].shape == p.shape
        assert optimizer.state[p]["step"].item() == 3


def test_adam_state_moves_to_torchs_adam_and_back() -> None:
    ours, theirs = parameters(), parameters()
    mine, other = FusedAdam(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.0, fused=True)
    train(mine, 3)
    train(other, 3)
    state, other_state = copy.deepcopy(mine.state_dict()["state"]), copy.deepcopy(other.state_dict()["state"])
    mine.load_state_dict({"state": other_state, "param_groups": mine.state_dict()["param_groups"]})
    other.load_state_dict({"state": state, "param_groups": other.state_dict()["param_groups"]})
    train(mine, 2, seed=5)
    train(other, 2, seed=5)
    assert_equal(ours, theirs, **FIVE_FP32_STEPS)


@pytest.mark.parametrize("kind", [*ADAMS, FusedLamb, DeepSpeedCPUAdagrad])
def test_amsgrad_is_refused_as_a_runtime_error(kind: Any) -> None:
    with pytest.raises(RuntimeError, match=f"{kind.__name__} was given amsgrad=True"):
        kind(parameters(), amsgrad=True)


@pytest.mark.parametrize("kind", ALL)
def test_senseless_hyperparameters_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"lr=-1, but a number of at least 0 is needed"):
        kind(parameters(), lr=-1)
    with pytest.raises(ValueError, match=r"weight_decay=nan"):
        kind(parameters(), weight_decay=float("nan"))
    if kind is not DeepSpeedCPUAdagrad:
        with pytest.raises(ValueError, match=r"betas=\(0.9, 1.0\), but two numbers in \[0, 1\)"):
            kind(parameters(), betas=(0.9, 1.0))


@pytest.mark.parametrize("kind", [FusedLion, DeepSpeedCPULion])
def test_lion_follows_the_papers_update(kind: Any) -> None:
    (p, *_) = ours = parameters(torch.float64)
    want, m = p.detach().clone(), torch.zeros_like(p)
    optimizer = kind(ours, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(5):
        train(optimizer, 1, seed=step)
        want = want - 1e-2 * (torch.sign(0.9 * m + 0.1 * p.grad) + 0.1 * want)
        m = 0.99 * m + 0.01 * p.grad
        # fp64: a handful of operations a step; the momentum starts at zero, so its error is absolute in the gradient.
        torch.testing.assert_close(p.detach(), want.detach(), rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], m.detach(), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adagrad_equals_torchs(dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    train(DeepSpeedCPUAdagrad(ours, weight_decay=0.1), 5)
    train(torch.optim.Adagrad(theirs, lr=1e-2, weight_decay=0.1, fused=True), 5)
    assert_equal(ours, theirs, **({} if dtype == torch.float64 else FIVE_FP32_STEPS))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("corrected", [True, False])
def test_lamb_follows_the_papers_update(inside: bool, corrected: bool) -> None:
    ours = parameters(torch.float64)
    wants = [p.detach().clone() for p in ours]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in wants]
    optimizer = FusedLamb(
        ours, lr=1e-2, weight_decay=0.1, eps=1e-6, eps_inside_sqrt=inside, bias_correction=corrected, max_coeff=1.5
    )
    for step in range(1, 5):
        train(optimizer, 1, seed=step)
        ratios = []
        for p, want, (m, v) in zip(ours, wants, moments, strict=True):
            m.mul_(0.9).add_(0.1 * p.grad)
            v.mul_(0.999).add_(0.001 * p.grad**2)
            m_hat = m / (1 - 0.9**step) if corrected else m
            v_hat = v / (1 - 0.999**step) if corrected else v
            update = m_hat / ((v_hat + 1e-6).sqrt() if inside else v_hat.sqrt() + 1e-6) + 0.1 * want
            ratios.append(min(max((want.norm() / update.norm()).item(), 0.01), 1.5))
            want.sub_(1e-2 * ratios[-1] * update)
            # fp64: some tens of operations and two norms a step; 1 - beta**step comes from expm1 there and a power here.
            torch.testing.assert_close(p.detach(), want, rtol=1e-12, atol=1e-12)
        assert optimizer.get_lamb_coeffs() == pytest.approx(ratios, rel=1e-12)


def test_lamb_takes_a_ratio_of_one_where_a_norm_is_zero() -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = FusedLamb([p], lr=0.5, min_coeff=2.0)
    p.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == [1.0]
    torch.testing.assert_close(p.detach(), torch.full((3,), -0.5))  # m_hat / sqrt(v_hat) = 1 at the first step


def test_lamb_scales_gradients_down_to_max_grad_norm() -> None:
    clipped, plain = parameters(torch.float64), parameters(torch.float64)
    optimizer = FusedLamb(clipped, max_grad_norm=0.5)
    train(optimizer, 1)
    other = FusedLamb(plain)
    for p, q in zip(plain, clipped, strict=True):
        p.grad = q.grad.clone()
    torch.nn.utils.clip_grad_norm_(plain, 0.5)
    other.step()
    assert_equal(clipped, plain, rtol=1e-12, atol=1e-12)


def test_lamb_refuses_crossed_bounds() -> None:
    with pytest.raises(ValueError, match=r"0 <= min_coeff <= max_coeff is needed"):
        FusedLamb(parameters(), min_coeff=2, max_coeff=1)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("layout", ["transposed", "strided", "gradient only"])
def test_strides_do_not_change_the_update(kind: Any, layout: str) -> None:
    values, grads = torch.randn(4, 6), torch.randn(4, 6)
    plain = torch.nn.Parameter(values.clone())
    if layout == "transposed":
        odd = torch.nn.Parameter(values.t().contiguous().t())
        odd.grad = grads.clone()
    elif layout == "strided":
        odd = torch.nn.Parameter(torch.stack([values, torch.full_like(values, 9.0)], -1)[..., 0])
        odd.grad = grads.clone()
    else:
        odd = torch.nn.Parameter(values.clone())
        odd.grad = grads.t().contiguous().t()
    assert not (odd.is_contiguous() and odd.grad.is_contiguous())
    plain.grad = grads.clone()
    for p in (plain, odd):
        optimizer = kind([p], lr=0.1)
        optimizer.step()
        optimizer.step()
    assert torch.equal(odd, plain)
    if layout == "strided":
        assert odd.untyped_storage().nbytes() == 2 * values.numel() * 4
        beside = odd.detach().as_strided((24,), (2,), 1)
        assert torch.equal(beside, torch.full((24,), 9.0))


@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_with_fp32_state_step_in_fp32_and_round_once(kind: Any, dtype: torch.dtype) -> None:
    narrow = torch.nn.Parameter(torch.randn(50).to(dtype))
    wide = torch.nn.Parameter(narrow.detach().float())
    for step in range(3):
        grad = torch.randn(50).to(dtype)
        if step == 0:
            optimizers = kind([narrow], lr=0.1), kind([wide], lr=0.1)
        narrow.grad, wide.grad = grad.clone(), grad.float()
        wide.data.copy_(narrow.detach())
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(narrow.detach(), wide.detach().to(dtype))
        for key in optimizers[0].state_keys:
            assert optimizers[0].state[narrow][key].dtype == torch.float32
            assert torch.equal(optimizers[0].state[narrow][key], optimizers[1].state[wide][key])


@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad])
def test_state_may_have_the_parameters_16_bits(kind: Any) -> None:
    p = torch.nn.Parameter(torch.randn(50).bfloat16())
    optimizer = kind([p], fp32_optimizer_states=False)
    train(optimizer, 2)
    assert {optimizer.state[p][key].dtype for key in optimizer.state_keys} == {torch.bfloat16}
    assert torch.isfinite(p).all()


@pytest.mark.parametrize("kind", ALL)
def test_16_bit_state_is_computed_in_fp32_and_rounded_once_per_step(kind: Any) -> None:
    narrow = torch.nn.Parameter(torch.randn(50).bfloat16())
    wide = torch.nn.Parameter(narrow.detach().float())
    optimizer, reference = kind([narrow], lr=0.1), kind([wide], lr=0.1)
    optimizer.state_dtype = torch.bfloat16
    for _ in range(3):
        grad = torch.randn(50).bfloat16()
        narrow.grad, wide.grad = grad, grad.float()
        optimizer.step()
        reference.step()
        wide.data.copy_(wide.detach().bfloat16())
        assert torch.equal(narrow.detach().float(), wide.detach())
        for key in optimizer.state_keys:
            rounded, exact = optimizer.state[narrow][key], reference.state[wide][key]
            assert rounded.dtype == torch.bfloat16
            assert torch.equal(rounded, exact.bfloat16())
            exact.copy_(rounded)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_optimizer_continues_bit_for_bit(kind: Any, dtype: torch.dtype) -> None:
    whole, resumed = parameters(dtype), parameters(dtype)
    first = kind(whole, lr=0.1)
    train(first, 3)
    saved = copy.deepcopy(first.state_dict())
    for p, q in zip(resumed, whole, strict=True):
        p.data.copy_(q.data)
    second = kind(resumed)
    second.load_state_dict(saved)
    train(first, 2, seed=9)
    train(second, 2, seed=9)
    assert_equal(resumed, whole)
    for p, q in zip(resumed, whole, strict=True):
        for key, value in first.state[q].items():
            assert torch.equal(second.state[p][key], value)
            assert second.state[p][key].dtype == value.dtype


@pytest.mark.parametrize("kind", [k for k in ALL if k is not FusedLamb])
def test_lent_flat_slices_step_like_the_parameters_they_cover(kind: Any) -> None:
    """The engine's way: one optimizer, `group["params"]` lent one flat tensor at a time."""
    whole = torch.nn.Parameter(torch.randn(12))
    flat = whole.detach().clone()
    slices = [flat[:5], flat[5:6], flat[6:]]
    reference, lent = kind([whole], lr=0.1), kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    owned = lent.param_groups[0]["params"]
    for _ in range(3):
        whole.grad = torch.randn(12)
        reference.step()
        for piece, grad in zip(slices, (whole.grad[:5], whole.grad[5:6], whole.grad[6:]), strict=True):
            piece.grad = grad
            lent.param_groups[0]["params"] = [piece]
            lent.step()
        lent.param_groups[0]["params"] = owned
    assert torch.equal(flat, whole.detach())
    assert set(lent.state) == set(slices)


@pytest.mark.parametrize("kind", ALL)
def test_several_dtypes_in_one_group_are_stepped_each_in_its_own(kind: Any) -> None:
    params = [torch.nn.Parameter(torch.ones(3).to(dtype)) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    train(kind(params, lr=0.1), 1)
    assert all((p != 1).any() for p in params)


@pytest.mark.parametrize("kind", ALL)
def test_parameters_without_gradient_or_elements_are_left_alone(kind: Any) -> None:
    still, empty = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(0))
    empty.grad = torch.ones(0)
    optimizer = kind([still, empty], lr=0.1)
    optimizer.step()
    assert torch.equal(still.detach(), torch.ones(3))
    assert still not in optimizer.state


@pytest.mark.parametrize("kind", ALL)
def test_a_sparse_gradient_is_refused_with_a_cure(kind: Any) -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradient of shape \(4, 2\).*sparse=False"):
        kind(table.parameters()).step()


def test_cpu_classes_refuse_parameters_elsewhere() -> None:
    p = torch.nn.Parameter(torch.ones(2, device="meta"))
    p.grad = torch.ones(2, device="meta")
    with pytest.raises(RuntimeError, match=r"on meta, but steps in host memory"):
        DeepSpeedCPUAdam([p]).step()


def test_zero_grad_drops_or_fills_as_the_constructor_says() -> None:
    (p, *_) = params = parameters()
    train(FusedAdam(params), 1)
    FusedAdam(params, set_grad_none=False).zero_grad()
    assert torch.equal(p.grad, torch.zeros_like(p))
    FusedAdam(params).zero_grad()
    assert p.grad is None


def test_a_closure_recomputes_the_loss_with_gradients_on() -> None:
    (p, *_) = params = parameters()
    optimizer = FusedAdam(params)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    before = p.detach().clone()
    assert optimizer.step(closure) == (before**2).sum()
    assert not torch.equal(before, p.detach())


@given(scale=st.sampled_from([2.0, 0.25, 1024.0]))
def test_the_kernel_divides_gradients_by_grad_scale(scale: float) -> None:
    scaled, plain = parameters(), parameters()
    optimizer, reference = FusedAdam(scaled), FusedAdam(plain)
    train(reference, 1)
    for p, q in zip(scaled, plain, strict=True):
        p.grad = q.grad * scale  # exact: powers of two
    optimizer.grad_scale = torch.tensor([scale])
    optimizer.step()
    assert_equal(scaled, plain)


def test_a_step_with_found_inf_changes_nothing() -> None:
    params = parameters()
    optimizer = FusedAdam(params)
    train(optimizer, 1)
    before = copy.deepcopy((params, optimizer.state_dict()))
    optimizer.found_inf = torch.tensor([1.0])
    train(optimizer, 1, seed=2)
    assert_equal(params, before[0])
    for i, state in before[1]["state"].items():
        for key, value in state.items():
            assert torch.equal(optimizer.state_dict()["state"][i][key], value)


def test_torchs_grad_scaler_drives_the_fused_step() -> None:
    ours, theirs = parameters(), parameters()
    for params, optimizer in ((ours, FusedAdam(ours)), (theirs, torch.optim.AdamW(theirs, weight_decay=0.0, fused=True))):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(sum((p**2).sum() for p in params)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_equal(ours, theirs, **FIVE_FP32_STEPS)


def test_state_with_foreign_strides_is_refused_instead_of_misread() -> None:
    p = torch.nn.Parameter(torch.randn(3, 4))
    optimizer = FusedAdam([p])
    train(optimizer, 1)
    optimizer.state[p]["exp_avg"] = torch.zeros(4, 3).t()
    with pytest.raises(RuntimeError, match=r"state 'exp_avg' has strides \(1, 3\)"):
        optimizer.step()


def test_loading_takes_its_own_tensors_as_they_are_and_copies_all_others() -> None:
    optimizer = FusedAdam(parameters())
    train(optimizer, 1)
    saved = optimizer.state_dict()
    own = {i: state["exp_avg"] for i, state in saved["state"].items()}
    saved["state"] = {i: {**state, "exp_avg_sq": state["exp_avg_sq"].clone()} for i, state in saved["state"].items()}
    optimizer.load_state_dict(saved)
    for i, state in optimizer.state_dict()["state"].items():
        assert state["exp_avg"] is own[i]
        assert state["exp_avg_sq"] is not saved["state"][i]["exp_avg_sq"]
        assert torch.equal(state["exp_avg_sq"], saved["state"][i]["exp_avg_sq"])


@pytest.mark.parametrize("kind", ALL)
def test_backward_through_a_graph_from_before_a_step_is_refused(kind: Any) -> None:
    """The kernels write past torch, and must tell autograd."""
    (p, *_) = params = parameters()
    loss = (p**3).sum()
    train(kind(params, lr=0.1), 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
@pytest.mark.parametrize("kind", ALL)
def test_a_copy_of_an_optimizer_steps_as_it_does(kind: Any, copied: Callable[[Any], Any]) -> None:
    options = {"adamw_mode": False} if kind is DeepSpeedCPUAdam else {}
    optimizer = kind(parameters(), lr=0.1, weight_decay=0.1, **options)
    train(optimizer, 2)
    other = copied(optimizer)
    other.zero_grad()
    train(optimizer, 2, seed=5)
    train(other, 2, seed=5)
    assert_equal(other.param_groups[0]["params"], optimizer.param_groups[0]["params"])


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [(FusedAdam, torch.optim.AdamW), (DeepSpeedCPUAdam, torch.optim.AdamW), (DeepSpeedCPUAdagrad, torch.optim.Adagrad)],
)
def test_a_state_dict_of_torchs_optimizer_loads_and_steps_on(kind: Any, theirs: Any) -> None:
    params, others = parameters(), parameters()
    reference = theirs(params, lr=1e-2, weight_decay=0.1)
    train(reference, 2)
    ours = kind(others)
    for p, q in zip(others, params, strict=True):
        p.data.copy_(q.data)
    ours.load_state_dict(copy.deepcopy(reference.state_dict()))
    train(reference, 2, seed=5)
    train(ours, 2, seed=5)
    assert_equal(others, params, **FIVE_FP32_STEPS)


@pytest.mark.parametrize("name", ["amsgrad", "maximize"])
def test_a_state_dict_that_asks_for_more_is_refused(name: str) -> None:
    optimizer = FusedAdam(parameters())
    saved = torch.optim.AdamW(parameters(), **{name: True}).state_dict()
    with pytest.raises(RuntimeError, match=f"{name}=True, which this optimizer does not have"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("kind", ALL)
def test_what_no_step_could_serve_is_refused_in_words_at_any_step(kind: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4, 2))
    optimizer = kind([p])
    p.grad = torch.ones(4, 2)
    optimizer.step()
    p.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match=r"sparse gradient of shape \(4, 2\)"):
        optimizer.step()
    wave = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    wave.grad = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match=r"complex parameter"):
        kind([wave]).step()


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("wrong", [{"lr": "x"}, {"betas": 0.9}])
def test_hyperparameters_of_another_type_are_refused_in_words(kind: Any, wrong: dict[str, Any]) -> None:
    if kind is DeepSpeedCPUAdagrad and "betas" in wrong:
        pytest.skip("Adagrad has no betas")
    with pytest.raises(ValueError, match=r"needed"):
        kind(parameters(), **wrong)
