"""The kernels against their twin, bit by bit: every rule, dtype, instruction set and number of threads."""

from __future__ import annotations

import copy
import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepspeed.ops.host_step import (
    Adagrad,
    Adam,
    Lamb,
    Lion,
    Parts,
    Rule,
    Sgd,
    lamb_apply,
    lamb_update,
    step,
    sum_of_squares,
)
from deepspeed.ops.host_step.squares import SPAN_NUMEL, sum_of_squares_twin
from deepspeed.ops.host_step.twin import CHUNK_NUMEL, lamb_apply_twin, lamb_update_twin, step_twin
from deepspeed.ops.native import library

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (FP32, BF16, FP16)
ISAS = ("avx512", "avx2", "generic")
RULES: dict[str, Rule] = {
    "AdamW": Adam(0.01, 0.1),
    "Adam with L2": Adam(0.01, 0.1, is_decoupled=False),
    "Adam, uncorrected, beta1 0": Adam(0.01, beta1=0.0, is_corrected=False),
    "Adagrad": Adagrad(0.01),
    "Adagrad with decay": Adagrad(0.01, 0.1),
    "Lion": Lion(0.01, 0.1),
    "SGD": Sgd(0.1, 0.1, dampening=0.3),
    "SGD, nesterov": Sgd(0.1, is_nesterov=True),
}
LAMBS: dict[str, Lamb] = {
    "LAMB": Lamb(0.01, 0.1),
    "LAMB, eps inside": Lamb(0.01, is_eps_inside=True),
    "LAMB, uncorrected": Lamb(0.01, 0.1, is_corrected=False),
}
NUMELS = (1, 33, 0, 1025, SPAN_NUMEL + 5)  # a block and a span, each with a rest

needs_native = pytest.mark.skipif(library() is None, reason="needs the native library, which this installation lacks")


@pytest.fixture
def use_isa() -> Iterator[Callable[[str], bool]]:
    """Let the kernels of an instruction set run; False where this processor lacks it."""
    native = library()
    assert native is not None  # needs_native
    choose = native.function("ds_set_isa", ctypes.c_int32, ctypes.c_char_p)
    yield lambda name: choose(name.encode()) == 0
    assert choose(native.isa.encode()) == 0


def parts_of(rule: Rule, dtypes: Sequence[Any], numels: Sequence[int] = NUMELS, seed: int = 0) -> Parts:
    """Random parts: `dtypes` are those of parameter, gradient, states, and values or None."""
    generator = torch.Generator().manual_seed(seed)
    param, grad, state, values = dtypes

    def drawn(numel: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return (torch.randn(numel, generator=generator) * scale).to(dtype)

    return Parts(
        [drawn(n, param) for n in numels],
        [drawn(n, grad, 10.0 ** (2 - n % 7)) for n in numels],
        [[drawn(n, state).abs() for n in numels] for _ in range(rule.states)],
        [torch.tensor(float((seed + n) % 3)) for n in numels],
        None if values is None else [torch.zeros(n, dtype=values) for n in numels],
        [n % 2 == 1 for n in numels],
    )


def tensors_of(parts: Parts) -> list[Tensor]:
    states = [each for column in parts.states for each in column]
    return [*parts.params, *parts.grads, *states, *parts.steps, *(v for v in parts.values or () if v is not None)]


def assert_same(ours: Parts, theirs: Parts) -> None:
    for mine, other in zip(tensors_of(ours), tensors_of(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


@needs_native
@pytest.mark.parametrize("name", RULES)
def test_kernels_give_the_bits_of_the_twin(name: str, use_isa: Callable[[str], bool]) -> None:
    combinations = list(itertools.product(DTYPES, DTYPES, DTYPES, (None, *DTYPES)))
    for number, dtypes in enumerate(combinations[:: 5 if name != "AdamW" else 2]):
        native, twin = parts_of(RULES[name], dtypes, seed=number), parts_of(RULES[name], dtypes, seed=number)
        torch.set_num_threads(1 + number % 3)
        if not use_isa(ISAS[number % 3]):
            continue
        for _ in range(2):
            step([(RULES[name], native, 0.3)])
            step_twin(RULES[name], twin, 0.3)
        assert_same(native, twin)


@needs_native
@pytest.mark.parametrize("name", LAMBS)
def test_both_passes_of_lamb_give_the_bits_of_the_twin(name: str, use_isa: Callable[[str], bool]) -> None:
    rule, ratios = LAMBS[name], [0.1, 0.7, 1.0, 2.0, 0.3]
    for number, dtypes in enumerate(itertools.product(DTYPES, (FP32, BF16), DTYPES, (None, BF16))):
        native, twin = parts_of(rule, dtypes, seed=number), parts_of(rule, dtypes, seed=number)
        if not use_isa(ISAS[number % 3]):
            continue
        squares, kept = lamb_update([(rule, native, 0.3)])
        wanted, updates = lamb_update_twin(rule, twin, 0.3)
        assert torch.equal(squares, wanted)
        assert all((each is None) == (dtypes[2] == FP32) for each in kept)  # fp32 moments give the update again
        lamb_apply([(rule, native, 0.3)], kept, ratios)
        lamb_apply_twin(rule, twin, updates, ratios)
        assert_same(native, twin)


@needs_native
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_parts_with_and_without_values_share_a_call(order: tuple[int, ...]) -> None:
    rule = RULES["AdamW"]

    def made() -> list[Parts]:
        with_both, bare, with_values = (parts_of(rule, (FP32, BF16, FP32, BF16), seed=seed) for seed in range(3))
        each = (with_both, replace(bare, values=None, clears=None), replace(with_values, clears=None))
        return [each[number] for number in order]

    native, twin = made(), made()
    step([(rule, parts, 0.3) for parts in native])
    for parts in twin:
        step_twin(rule, parts, 0.3)
    for ours, theirs in zip(native, twin, strict=True):
        assert_same(ours, theirs)


@needs_native
@given(numels=st.lists(st.integers(0, 3_000), min_size=1, max_size=6), cut=st.integers(0, 3_000))
def test_cutting_and_joining_tensors_changes_no_bit(numels: list[int], cut: int) -> None:
    rule = RULES["AdamW"]
    whole = parts_of(rule, (FP32, BF16, FP32, BF16), [sum(numels)])
    pieces = copy.deepcopy(whole)
    step([(rule, whole, 0.5)])
    split = [list(torch.split(each, numels)) for each in tensors_of(pieces)[:4]]
    assert pieces.values is not None
    values = pieces.values[0]
    assert values is not None
    steps = [pieces.steps[0].clone() for _ in numels]
    torch.set_num_threads(1 + cut % 3)
    step(
        [(rule, Parts(split[0], split[1], split[2:4], steps, list(torch.split(values, numels)), [False] * len(numels)), 0.5)]
    )
    assert_same(replace(whole, steps=[], grads=[]), replace(pieces, steps=[], grads=[]))


@pytest.mark.parametrize("form", [step, lambda work: [step_twin(*each) for each in work]])
@pytest.mark.parametrize("name", RULES)
def test_values_that_are_not_finite_stay_where_they_are(name: str, form: Callable[[Any], object]) -> None:
    parts = parts_of(RULES[name], (FP32, FP32, FP32, BF16), [2_000])
    parts.grads[0][7], parts.grads[0][1_999] = float("nan"), float("inf")
    form([(RULES[name], parts, 1.0)])
    assert parts.values is not None
    values = parts.values[0]
    assert values is not None
    assert torch.equal(values.isnan(), parts.params[0].isnan())
    assert not parts.states[0][0][7].isfinite()
    others = torch.ones(2_000, dtype=torch.bool)
    others[[7, 1_999]] = False
    assert parts.params[0][others].isfinite().all()


@pytest.mark.parametrize("form", [step, lambda work: [step_twin(*each) for each in work]])
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (Sgd(0.1, 0.01, momentum=0.8, dampening=0.2), {"weight_decay": 0.01, "momentum": 0.8, "dampening": 0.2}),
        (Sgd(0.1, momentum=0.8, is_nesterov=True), {"momentum": 0.8, "nesterov": True}),
    ],
)
def test_sgd_is_that_of_torch(rule: Sgd, options: dict[str, Any], form: Callable[[Any], object]) -> None:
    (start,) = parts_of(rule, (FP32, FP32, FP32, None), [100]).params
    wanted = torch.nn.Parameter(start.double())
    optimizer = torch.optim.SGD([wanted], lr=0.1, foreach=False, **options)
    parts = Parts([start.clone()], [torch.zeros(100)], [[torch.full((100,), 9.0)]], [torch.tensor(0.0)])
    for seed in range(4):
        grad = torch.randn(100, generator=torch.Generator().manual_seed(seed))
        parts.grads[0].copy_(grad)
        wanted.grad = grad.double()
        form([(rule, parts, 1.0)])
        optimizer.step()
    # fp32 against fp64: four steps of some six operations, 6e-8 each, on values up to 4.
    torch.testing.assert_close(parts.params[0].double(), wanted.detach(), rtol=1.5e-6, atol=6e-6)


def test_the_twin_cuts_large_tensors_without_changing_a_bit() -> None:
    rule = RULES["AdamW"]
    whole = parts_of(rule, (FP32, FP32, FP32, None), [CHUNK_NUMEL + 100])
    halves = copy.deepcopy(whole)
    step_twin(rule, whole, 0.5)
    split = [list(torch.split(each, CHUNK_NUMEL - 3)) for each in tensors_of(halves)[:4]]
    step_twin(rule, Parts(split[0], split[1], split[2:], [halves.steps[0], halves.steps[0].clone()], None, [False] * 2), 0.5)
    for mine, other in zip(tensors_of(whole)[:4], tensors_of(halves)[:4], strict=True):
        assert torch.equal(mine, other)


# -- sums of squares --------------------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_a_sum_of_squares_has_one_value(dtype: torch.dtype, use_isa: Callable[[str], bool]) -> None:
    flats = [torch.randn(n).to(dtype) for n in (0, 1, 1_024, 3 * SPAN_NUMEL + 77, 31)]
    found = {sum_of_squares_twin(flats).item()}
    for isa, number in itertools.product(ISAS, (1, 2, 3)):
        torch.set_num_threads(number)
        if use_isa(isa):
            found.add(sum_of_squares(flats).item())
    assert len(found) == 1
    exact = sum(flat.double().square().sum().item() for flat in flats)
    assert found.pop() == pytest.approx(exact, rel=1e-12)


def test_squares_beyond_fp32_are_no_infinity() -> None:
    assert sum_of_squares([torch.full((3,), 1e30)]).item() == pytest.approx(3e60, rel=1e-6)
