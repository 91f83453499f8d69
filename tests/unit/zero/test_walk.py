"""The walk: what one call of the optimizer sees, what it costs, factors and decisions that stay on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.comm.algorithms import LocalReducer, LocalReduceScatterer
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.native import library
from deepspeed.ops.optimizer import GroupOptimizer
from deepspeed.optim import is_elementwise
from deepspeed.zero import master as master_module
from deepspeed.zero.gradients import ShardedGradients, ViewGradients, largest_bucket_numel
from deepspeed.zero.master import MasterWeights
from tests.support.flat_groups import CPU, flat_group

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
SHAPES = ((5, 3), (4,), (), (2, 7), (11,))
SUB_GROUP_NUMEL = 16

OURS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.1, weight_decay=0.1),
    "DeepSpeedCPUAdam": DeepSpeedCPUAdam,
    "FusedLion": lambda params: FusedLion(params, lr=0.1),
    "DeepSpeedCPULion": DeepSpeedCPULion,
    "DeepSpeedCPUAdagrad": DeepSpeedCPUAdagrad,
    "FusedLamb": FusedLamb,
}
FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
}
SKIPPING = {name: kind for name, kind in {**OURS, **FUSED}.items() if "Adam" in name or name == "SGD"}


@pytest.fixture(autouse=True)
def _small_sub_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(master_module.SUB_GROUP_NUMEL, "cpu", SUB_GROUP_NUMEL)


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our optimizers go the way they go on an accelerator: torch's kernels, sub-group by sub-group."""
    monkeypatch.setattr(GroupOptimizer, "can_step_in_one_pass", lambda *_: False)
    monkeypatch.setattr(GroupOptimizer, "_fits_host", lambda *_: False)


@pytest.fixture(params=["one pass", "as on a device"])
def form(request: pytest.FixtureRequest) -> None:
    """Both ways of the update."""
    if request.param != "one pass":
        request.getfixturevalue("as_on_a_device")


class Walk:
    """A model without layers, its masters and a counter of what is dispatched."""

    def __init__(
        self,
        kind: Callable[[Any], torch.optim.Optimizer],
        *,
        dtype: torch.dtype = FP32,
        master: torch.dtype = FP32,
        **options: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
        optimizer = kind(self.params)
        flat = flat_group([(str(i), p) for i, p in enumerate(self.params)], dtype=dtype, master=master)
        pool = LocalReduceScatterer(2 * largest_bucket_numel(flat), dtype, CPU)
        flat.attach_gradients(ShardedGradients(flat, pool, dtype))
        self.flat = flat
        self.master = MasterWeights([flat], optimizer, is_elementwise=is_elementwise(optimizer), **options)
        self.optimizer = optimizer

    def step(self, factor: float | Tensor, found_inf: Tensor | None = None, *, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in self.params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        for number in range(len(self.flat.layout.buckets)):
            self.flat.gradients.collect(number)
            self.flat.gradients.launch(number)
            self.flat.gradients.wait(number)
        self.master.step(factor, found_inf)
        self.flat.gradients.close_window()

    def everything(self) -> list[Tensor]:
        """Copies of weights, masters and state."""
        masters = [self.flat.own_master(extent.start, extent.stop) for extent in self.flat.extents]
        state = [v for each in self.optimizer.state.values() for v in each.values() if isinstance(v, Tensor)]
        return [each.detach().clone() for each in (*self.params, *masters, *state)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- sub-groups -------------------------------------------------------------------------------------------------------


def _seen_by_calls(walk: Walk, factor: float) -> list[int]:
    seen: list[int] = []
    walk.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: seen.append(
            sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        )
    )
    walk.step(factor)
    return seen


@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("most", [3, 8, 1_000])
def test_one_call_of_the_optimizer_sees_at_most_the_elements_of_sub_group_size(most: int, factor: float) -> None:
    walk = Walk(OURS["FusedAdam"], sub_group_numel=most)
    seen = _seen_by_calls(walk, factor)
    assert max(seen) <= most
    assert sum(seen) == walk.flat.layout.shard_numel
    assert len(seen) > 1 or most > walk.flat.layout.shard_numel


@pytest.mark.parametrize("name", [name for name in OURS if name != "FusedLamb"])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_sub_group_size_changes_no_number(name: str, factor: float) -> None:
    walks = [Walk(OURS[name], sub_group_numel=most) for most in (None, 5)]
    for step in range(3):
        for walk in walks:
            walk.step(factor, seed=step)
    for one, other in zip(walks[0].params, walks[1].params, strict=True):
        # fp32, three steps: the kernels compute the last elements of a tensor one by one, and may round them otherwise.
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_an_optimizer_that_is_not_element_wise_is_called_once_whatever_the_size() -> None:
    walk = Walk(OURS["FusedLamb"], sub_group_numel=3)
    assert _seen_by_calls(walk, 0.5) == [sum(p.numel() for p in walk.params)]


def test_all_batches_share_one_scratch() -> None:
    walk = Walk(OURS["FusedAdam"], dtype=BF16)
    walk.step(0.5)
    buffers = {
        id(view.untyped_storage()): view for batch in walk.master._sub_groups for view in walk.master._scaled.views(batch)
    }
    storages = {view.untyped_storage().data_ptr(): view.untyped_storage().nbytes() for view in buffers.values()}
    assert list(storages.values()) == [SUB_GROUP_NUMEL * 4]


# -- masters of 16 bits -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("form")
def test_a_16_bit_master_is_stepped_wide_and_shows_nothing_between_updates() -> None:
    walk = Walk(OURS["FusedAdam"], dtype=BF16, master=BF16, state_dtype=FP32)
    walk.step(0.5)
    assert not walk.flat.has_own_masters
    for s in walk.master.slices:
        assert s.param.dtype == FP32
        assert s.param.untyped_storage().nbytes() == FP32.itemsize
        assert not s.param.any()
        assert walk.optimizer.state[s.param]["exp_avg"].dtype == FP32


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("name", OURS)
def test_our_optimizers_keep_16_bit_state_when_told_to_and_forget_it_afterwards(name: str) -> None:
    walk = Walk(OURS[name], dtype=BF16, master=BF16, state_dtype=BF16)
    walk.step(0.5)
    kept = {v.dtype for state in walk.optimizer.state.values() for key, v in state.items() if key != "step"}
    assert kept == {BF16}
    walk.master.unshow()
    assert walk.optimizer.state_dtype is None  # type: ignore[attr-defined]


# -- factor and decision on the device --------------------------------------------------------------------------------


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 masters", "bf16 states"])
@pytest.mark.parametrize("name", [*OURS, *FUSED])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_a_factor_on_the_device_gives_the_numbers_of_a_python_number(name: str, precision: str, factor: float) -> None:
    options: dict[str, Any] = {} if precision == "fp32" else {"dtype": BF16}
    if precision in ("bf16 masters", "bf16 states"):
        options |= {"master": BF16, "state_dtype": FP32 if precision == "bf16 masters" else BF16}
    kind = {**OURS, **FUSED}[name]
    here, there = Walk(kind, **options), Walk(kind, **options)
    for step in range(2):
        here.step(factor, seed=step)
        there.step(torch.tensor(factor, dtype=FP64), seed=step)
    if precision == "fp32":  # with factor 1 one call covers everything here, several there: see sub_group_size
        for one, other in zip(here.params, there.params, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    else:
        assert same([p.detach() for p in here.params], [p.detach() for p in there.params])


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("precision", [{}, {"dtype": BF16}, {"dtype": BF16, "master": BF16, "state_dtype": FP32}])
@pytest.mark.parametrize("name", SKIPPING)
def test_found_inf_leaves_weights_and_state_as_they_were(name: str, precision: dict[str, Any]) -> None:
    skipping, plain = Walk(SKIPPING[name], **precision), Walk(SKIPPING[name], **precision)
    assert skipping.master.can_skip_on_device
    skipping.step(torch.tensor(float("nan")), torch.tensor(1.0), seed=9)  # the very first step already
    for step in range(2):
        plain.step(torch.tensor(0.5), seed=step)
        skipping.step(torch.tensor(0.5), torch.tensor(0.0, dtype=FP64), seed=step)
    assert same(skipping.everything(), plain.everything())
    before = skipping.everything()
    skipping.step(torch.tensor(float("inf")), torch.tensor(1.0), seed=7)
    assert same(skipping.everything(), before)
    assert not hasattr(skipping.optimizer, "found_inf")


@pytest.mark.parametrize("name", [name for name in {**OURS, **FUSED} if name not in SKIPPING])
def test_what_cannot_skip_on_the_device_says_so(name: str) -> None:
    assert not Walk({**OURS, **FUSED}[name]).master.can_skip_on_device


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_torchs_optimizers_without_the_fused_kernel_cannot_skip_on_the_device(kind: Any) -> None:
    assert not Walk(kind).master.can_skip_on_device


# -- what a step costs ------------------------------------------------------------------------------------------------


class Dispatched(TorchDispatchMode):
    """Counts operators; opening and closing a profiler range is none."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not str(func).startswith("profiler."):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _cost(walk: Walk, factor: float | Tensor) -> Counter[str]:
    walk.step(factor)  # state and scratch are made
    with Dispatched() as dispatched:
        walk.master.step(factor)
    return dispatched.counts


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", [*OURS, *FUSED])
def test_a_step_never_waits_for_the_device(name: str, dtype: torch.dtype) -> None:
    for factor in (0.5, torch.tensor(0.5)):
        counts = _cost(Walk({**OURS, **FUSED}[name], dtype=dtype), factor)
        assert counts
        assert not [op for op in counts if "_local_scalar_dense" in op or "nonzero" in op or "is_nonzero" in op]


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize(
    ("name", "dtype", "most"),
    [
        ("FusedAdam", FP32, 4),  # view of the gradient, scale, count the step, kernel
        ("FusedAdam", BF16, 6),  # and convert, write back
        ("AdamW", BF16, 6),
        ("SGD", BF16, 5),
        ("DeepSpeedCPUAdagrad", BF16, 6),
        ("FusedLion", FP32, 7),  # four instead of a kernel
        ("FusedLion", BF16, 9),
    ],
)
def test_a_sub_group_costs_a_handful_of_operators(name: str, dtype: torch.dtype, most: int) -> None:
    walk = Walk({**OURS, **FUSED}[name], dtype=dtype)
    counts = _cost(walk, 0.5)
    assert sum(counts.values()) <= most * len(walk.master._sub_groups) + len(walk.master.slices) - len(
        walk.master._sub_groups
    )


@pytest.mark.usefixtures("as_on_a_device")
def test_lamb_costs_the_same_however_many_parameters_there_are_but_for_views() -> None:
    counts = _cost(Walk(OURS["FusedLamb"], dtype=BF16), 0.5)
    views = sum(count for op, count in counts.items() if "slice" in op or "view" in op)
    assert views <= 2 * len(SHAPES)
    assert sum(counts.values()) - views <= 45


# -- one pass ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 masters"])
@pytest.mark.parametrize("name", OURS)
def test_a_step_hook_sees_gradients_and_changes_no_number(name: str, precision: str) -> None:
    options: dict[str, Any] = {} if precision == "fp32" else {"dtype": BF16}
    if precision == "bf16 masters":
        options |= {"master": BF16, "state_dtype": FP32}
    plain, watched = Walk(OURS[name], **options), Walk(OURS[name], **options)
    seen: list[bool] = []
    watched.optimizer.register_step_post_hook(
        lambda optimizer, args, kwargs: seen.extend(p.grad is not None for g in optimizer.param_groups for p in g["params"])
    )
    for step in range(3):
        plain.step(0.3, seed=step)
        watched.step(0.3, seed=step)
    assert seen
    assert all(seen)
    assert same(plain.everything(), watched.everything())


@pytest.mark.skipif(library() is None, reason="needs the native library: its twin is made of torch's calls")
@pytest.mark.parametrize("name", [name for name in OURS if name != "FusedLamb"])
def test_one_pass_asks_torch_for_views_and_nothing_else(name: str) -> None:
    counts = _cost(Walk(OURS[name], dtype=BF16), 0.5)
    assert {op for op in counts if "slice" not in op and "view" not in op and "detach" not in op} == set()


@pytest.mark.parametrize("most", [None, 5])
def test_one_pass_clears_gradients_that_are_views(most: int | None) -> None:
    params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = FusedAdam(params, lr=0.1)
    flat = flat_group([(str(i), p) for i, p in enumerate(params)], dtype=FP32, master=FP32)
    flat.attach_gradients(ViewGradients(flat, LocalReducer(flat.layout.numel, FP32, CPU)))
    walk = MasterWeights([flat], optimizer, is_elementwise=True, sub_group_numel=most)
    for p in params:
        assert p.grad is not None
        p.grad.fill_(1.0)
    walk.step(1.0)
    assert not flat.gradients.shards()[0].any()
    for p in params:
        torch.testing.assert_close(p.detach(), torch.full_like(p, 0.9))  # the first step of Adam is one rate
