"""What one step costs that no device makes cheaper: host synchronisations, operators, collectives, copies of gradients.

Counted under a dispatch mode, so the figures are the same on any machine, and compared with the plain loop: the same model
in the same precision, `zero_grad(set_to_none=True)`, fused AdamW. At stage 0 gradients stay in place, so there the plain
loop keeps them too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.comm.recorder import RECORDER
from deepspeed.ops import native
from tests.support.engines import config, make_engine, zero
from tests.support.models import TinyModel, build, cast_batches, make_batches
from tests.support.ranks import run_ranks

STAGES = (0, 1, 2, 3)
LAYERS = 12
WORLD_SIZE = 2
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Deep(TinyModel):
    """Layers of one size in a list: each is a unit, and the bucket size makes each a bucket."""

    VALUES = 64

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(self.VALUES, self.VALUES) for _ in range(LAYERS))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return F.mse_loss(inputs.float(), targets.float())


LAYER_NUMEL = Deep.VALUES * (Deep.VALUES + 1)
NUMEL = LAYERS * LAYER_NUMEL

_SYNCHRONISING = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "unique", "is_nonzero")
_VIEWING = ("slice", "view", "detach", "as_strided", "unbind", "split", "promote_types")  # run nothing on a device
_COPYING = ("copy_", "_to_copy", "clone", "cat", "stack", "_foreach_copy_", "_foreach_add_")


@dataclass
class Counts:
    """Of one step on one rank."""

    operators: Counter[str] = field(default_factory=Counter)
    synchronisations: int = 0
    copied_in_backward: int = 0
    """Elements that copying operators wrote during backward."""
    collectives: Counter[str] = field(default_factory=Counter)


class CountingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every operator that is dispatched."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts
        self.is_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.counts.operators[name] += 1
        self.counts.synchronisations += name in _SYNCHRONISING
        if self.is_backward and name in _COPYING:
            self.counts.copied_in_backward += _written(name, args)
        return func(*args, **(kwargs or {}))


def _written(name: str, args: Any) -> int:
    tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
    return sum(tensor.numel() for tensor in tensors)


@contextmanager
def counting_reads(counts: Counts) -> Iterator[None]:
    """Count the ways to read a tensor that dispatch nothing on a CPU but wait on other devices."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "numpy", "cpu", "__array__"):
            patch.setattr(Tensor, name, _counted(getattr(Tensor, name), counts))
        yield


def _counted(method: Any, counts: Counts) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts.synchronisations += 1
        return method(*args, **kwargs)

    return counted


class SlowDevice:
    """Stands in for `accelerator.late.LateNumber`: as on a device, a number is not there before the step is over."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._numbers: list[_SlowNumber] = []

    def __call__(self, value: Tensor) -> _SlowNumber:
        self._numbers.append(_SlowNumber(value, self._counts))
        return self._numbers[-1]

    def catch_up(self) -> None:
        """Time has passed: every number is there."""
        for number in self._numbers:
            number.is_there = True


class _SlowNumber:
    def __init__(self, value: Tensor, counts: Counts) -> None:
        self._value = value
        self._counts = counts
        self.is_there = False

    def is_ready(self) -> bool:
        return self.is_there

    def get(self) -> float:
        """The number; asking before it is there is a synchronisation, after which it is."""
        self._counts.synchronisations += not self.is_there
        self.is_there = True
        with torch._C._DisableTorchDispatch():
            return self._value.item()


def _batches(precision: str) -> Any:
    return cast_batches(make_batches(build(Deep), 4, 1, WORLD_SIZE), DTYPES[precision])


def _ours(rank: int, _: int, stage: int, precision: str, keys: dict[str, Any]) -> Counts:
    model = build(Deep)
    blocks = zero(stage, reduce_bucket_size=LAYER_NUMEL, allgather_bucket_size=LAYER_NUMEL, **keys)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine = make_engine(model, config(**PRECISIONS[precision], **blocks), optimizer=optimizer)
    *warm_up, last = _batches(precision)
    counts = Counts()
    device = SlowDevice(counts)
    assert engine.optimizer is not None
    engine.optimizer.read_late = device
    for step in warm_up:  # the first steps make state and learn the order
        engine.backward(engine(*step[0][rank]))
        engine.step()
        device.catch_up()
    counts.synchronisations = 0
    RECORDER.reset()
    RECORDER.enabled = True
    with counting_reads(counts), CountingMode(counts) as mode:
        loss = engine(*last[0][rank])
        mode.is_backward = True
        engine.backward(loss)
        mode.is_backward = False
        engine.step()
    RECORDER.enabled = False
    device.catch_up()
    assert engine.was_step_applied()
    for name in RECORDER.operations():
        counts.collectives[name] = sum(entry[0] for entry in RECORDER.comms_dict[name].values())
    return counts


def _plain(stage: int, precision: str) -> Counts:
    model = build(Deep).to(DTYPES[precision])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    *warm_up, last = _batches(precision)
    for step in warm_up:
        model(*step[0][0]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=stage > 0)
    counts = Counts()
    with CountingMode(counts) as mode:
        loss = model(*last[0][0])
        mode.is_backward = True
        loss.backward()
        mode.is_backward = False
        optimizer.step()
        optimizer.zero_grad(set_to_none=stage > 0)
    return counts


GATHERS: dict[int, tuple[dict[str, Any], ...]] = {
    0: ({},),
    1: ({},),
    2: ({},),
    3: (
        {"stage3_param_persistence_threshold": 0},
        {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0},
    ),
}
SETTINGS = [(stage, precision, keys) for stage in STAGES for precision in PRECISIONS for keys in GATHERS[stage]]


def _count_all(rank: int, world_size: int) -> list[Counts]:
    return [_ours(rank, world_size, *setting) for setting in SETTINGS]


@pytest.fixture(scope="module")
def counted() -> list[tuple[tuple[int, str, dict[str, Any]], Counts]]:
    """Every setting with its counts on rank 0."""
    return list(zip(SETTINGS, run_ranks(_count_all, WORLD_SIZE, timeout_seconds=120)[0], strict=True))


_needs_kernels = pytest.mark.skipif(
    native.library() is None, reason="the twin of a host kernel is many of torch's operators"
)


@_needs_kernels
def test_a_step_never_waits_for_the_device_and_once_under_fp16(counted: list[Any]) -> None:
    # Under fp16 the loss scale of the next step depends on whether this one overflowed.
    assert [each[0] for each in counted if each[1].synchronisations != (each[0][1] == "fp16")] == []


@_needs_kernels
@pytest.mark.parametrize("stage", STAGES)
def test_operators_beyond_the_plain_loop_are_twenty_and_twelve_per_bucket(counted: list[Any], stage: int) -> None:
    for (its_stage, precision, keys), counts in counted:
        if its_stage == stage:
            beyond = counts.operators - _plain(stage, precision).operators
            running = {name: number for name, number in beyond.items() if name not in _VIEWING}
            gathered_again = LAYERS - 1 if "stage3_max_reuse_distance" in keys else 0  # units of their own, in backward
            assert sum(running.values()) <= 20 + 12 * (LAYERS + gathered_again), (stage, precision, running)


def test_there_is_one_collective_per_bucket_or_unit_and_one_for_the_norm(counted: list[Any]) -> None:
    for (stage, precision, keys), counts in counted:
        if stage == 0:
            wanted = {"all_reduce": LAYERS}
        else:
            gathers = 2 * LAYERS - 1 if "stage3_max_reuse_distance" in keys else LAYERS  # backward begins where forward ends
            wanted = {"reduce_scatter_tensor": LAYERS, "all_gather_into_tensor": gathers, "all_reduce": 1}
        assert counts.collectives == wanted, (stage, precision, keys)


def test_backward_copies_a_gradient_at_most_twice(counted: list[Any]) -> None:
    for (stage, precision, keys), counts in counted:
        gathered_again = (LAYERS - 1) / LAYERS if "stage3_max_reuse_distance" in keys else 0.0  # weights, not gradients
        of_gradients = counts.copied_in_backward / NUMEL - gathered_again
        plain = _plain(stage, precision).copied_in_backward / NUMEL
        assert 0 < of_gradients - plain <= 2, (stage, precision, keys)
