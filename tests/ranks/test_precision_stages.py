"""16-bit masters, 16-bit optimizer state and the accumulation format: what they save, and that they round where they say.

The reference is one process that computes in fp32 and rounds at the documented places (`Rounding`); everything the engine
does is element-wise and rounds at the same places, so weights are compared bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import FusedLion
from deepspeed.utils import safe_get_full_optimizer_state
from tests.support.engines import config, make_engine, train, zero
from tests.support.models import Mlp, build, cast_batches, make_batches
from tests.support.ranks import run_ranks
from tests.support.reference import Reference, relative_difference, train_reference

STEPS = 6
ACCUMULATION = 2  # with the loss scale a factor of a power of two: unscaling does not round
LOSS_SCALE = 256.0
SHARDING_STAGES = (1, 2, 3)
WORLD_SIZES = (1, 2)
RATE = 1e-2

Factory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Rounding:
    """An optimizer for the reference: steps fp32 copies with fp32 state, then rounds weights, and state if asked to."""

    def __init__(self, inner: torch.optim.Optimizer, dtype: torch.dtype, *, rounds_state: bool) -> None:
        self.inner = inner
        self.dtype = dtype
        self.rounds_state = rounds_state
        self.state = inner.state

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()
        for group in self.inner.param_groups:
            for p in group["params"]:
                p.copy_(p.to(self.dtype))
                for key, value in self.state[p].items():
                    if self.rounds_state and key != "step":
                        value.copy_(value.to(self.dtype))


@dataclass(frozen=True)
class Setting:
    """One training; `rounds_state` is what the optimizer is expected to do with the keys of `block`."""

    name: str
    factory: Factory
    block: dict[str, Any]
    state_dtype: torch.dtype
    dtype: torch.dtype = torch.bfloat16
    is_torchs_on_16_bits: bool = False
    """Whether the optimizer does all its arithmetic in 16 bits, as it does on a 16-bit model in plain torch."""

    @property
    def blocks(self) -> dict[str, Any]:
        if self.dtype == torch.float16:
            return {"fp16": {"enabled": True, "loss_scale": LOSS_SCALE, **self.block}}
        return {"bf16": {"enabled": True, **self.block}}

    def reference(self, world_size: int, stage: int) -> Reference:
        model = build(Mlp, dtype=self.dtype)
        rounds_state = self.state_dtype != torch.float32

        def factory(params: Iterable[nn.Parameter]) -> Any:
            inner = self.factory(params)
            return inner if self.is_torchs_on_16_bits else Rounding(inner, self.dtype, rounds_state=rounds_state)

        return train_reference(
            model,
            factory,
            _batches(self.dtype, world_size),
            dtype=None if self.is_torchs_on_16_bits else self.dtype,
            loss_scale=LOSS_SCALE if self.dtype == torch.float16 else 1.0,
            averages_each_micro_batch=stage >= 2,
        )


BF16_MASTERS = {"bf16_master_weights_and_grads": True}
BF16_STATES = BF16_MASTERS | {"bf16_optimizer_states": True}
FP16_MASTERS = {"fp16_master_weights_and_grads": True}
TORCHS = functools.partial(torch.optim.AdamW, lr=RATE, weight_decay=0.1)
OURS = functools.partial(FusedAdam, lr=RATE, weight_decay=0.1)
FP32, BF16 = torch.float32, torch.bfloat16

SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("bf16 masters, torch's AdamW", TORCHS, BF16_MASTERS, FP32),
        Setting("bf16 masters, FusedAdam", OURS, BF16_MASTERS, FP32),
        Setting("fp16 masters, torch's AdamW", TORCHS, FP16_MASTERS, FP32, torch.float16),
        Setting("fp16 masters, FusedAdam", OURS, FP16_MASTERS, FP32, torch.float16),
        Setting(
            "fp16 masters, SGD", functools.partial(torch.optim.SGD, lr=RATE, momentum=0.9), FP16_MASTERS, FP32, torch.float16
        ),
        Setting("bf16 states, FusedAdam", OURS, BF16_STATES, BF16),
        Setting("bf16 states, DeepSpeedCPUAdam", functools.partial(DeepSpeedCPUAdam, lr=RATE), BF16_STATES, BF16),
        Setting("bf16 states, DeepSpeedCPUAdagrad", functools.partial(DeepSpeedCPUAdagrad, lr=RATE), BF16_STATES, BF16),
        Setting("bf16 states, FusedLion", functools.partial(FusedLion, lr=RATE, weight_decay=0.1), BF16_STATES, BF16),
        Setting("bf16 states, torch's AdamW", TORCHS, BF16_STATES, BF16, is_torchs_on_16_bits=True),
    )
}


def _batches(dtype: torch.dtype, world_size: int) -> Any:
    return cast_batches(make_batches(build(Mlp), STEPS, ACCUMULATION, world_size), dtype)


@dataclass
class Trained:
    """Of one rank, by setting and ZeRO stage; weights are what the model and the optimizer both have."""

    weights: dict[tuple[str, int], dict[str, Tensor]] = field(default_factory=dict)
    masters: dict[tuple[str, int], dict[str, Tensor]] = field(default_factory=dict)
    state_nbytes: dict[tuple[str, int], float] = field(default_factory=dict)
    other_nbytes: dict[tuple[str, int], float] = field(default_factory=dict)
    moments: dict[tuple[str, int], dict[str, Tensor | None]] = field(default_factory=dict)


def _nbytes(engine: DeepSpeedEngine) -> tuple[float, float]:
    """Bytes of optimizer state tensors, and of masters that are memory of their own, per element of this rank's shards."""
    flats = engine._parts.partition.trained
    numel = sum(s.numel for s in engine.optimizer.master.slices)
    state = [v for each in engine.optimizer.state.values() for key, v in each.items() if key != "step"]
    own_masters = sum(flat.layout.shard_numel * flat.kind.master_dtype.itemsize for flat in flats if flat.has_own_masters)
    return sum(v.untyped_storage().nbytes() for v in state) / numel, own_masters / numel


def _first_moment(engine: DeepSpeedEngine) -> dict[str, Tensor | None]:
    found = {}
    for name, param in engine.module.named_parameters():
        for key in ("exp_avg", "momentum_buffer", "sum"):
            value = safe_get_full_optimizer_state(param, key)
            if value is not None:
                found[name] = value
    return found


def _train_all(rank: int, world_size: int) -> Trained:
    trained = Trained()
    for setting in SETTINGS.values():
        for stage in SHARDING_STAGES:
            model = build(Mlp, dtype=setting.dtype)
            keys = {"reduce_bucket_size": 100, "stage3_param_persistence_threshold": 10}
            settings = config(ACCUMULATION, **setting.blocks, **zero(stage, **keys))
            engine = make_engine(model, settings, optimizer=setting.factory(model.parameters()))
            outcome = train(engine, _batches(setting.dtype, world_size), rank)
            at = (setting.name, stage)
            trained.weights[at], trained.masters[at] = outcome.model_weights, outcome.weights
            trained.state_nbytes[at], trained.other_nbytes[at] = _nbytes(engine)
            trained.moments[at] = _first_moment(engine)
            engine.destroy()
    return trained


@dataclass
class Runs:
    """All results of one world size."""

    world_size: int
    ranks: list[Trained]


@pytest.fixture(scope="module", params=WORLD_SIZES, ids="{} ranks".format)
def runs(request: pytest.FixtureRequest) -> Runs:
    return Runs(request.param, run_ranks(_train_all, request.param, timeout_seconds=120))


@pytest.mark.parametrize("stage", SHARDING_STAGES)
@pytest.mark.parametrize("name", SETTINGS)
def test_weights_are_rounded_where_the_reference_rounds(runs: Runs, name: str, stage: int) -> None:
    wanted = SETTINGS[name].reference(runs.world_size, stage)
    for each in runs.ranks:
        weights = each.weights[name, stage]
        assert all(weight.dtype == SETTINGS[name].dtype for weight in weights.values())
        assert relative_difference(weights, wanted.model_weights) == 0
        assert relative_difference(each.masters[name, stage], weights) == 0  # nothing finer is kept
        moments = {n: next(v for key, v in state.items() if key != "step") for n, state in wanted.state.items()}
        assert relative_difference(each.moments[name, stage], moments) <= 1e-6  # type: ignore[arg-type]  # fp32, or none


@pytest.mark.parametrize("name", SETTINGS)
def test_there_is_no_second_copy_of_the_weights_and_state_has_the_bytes_of_the_key(runs: Runs, name: str) -> None:
    tensors = 1 if any(kind in name for kind in ("SGD", "Lion", "Adagrad")) else 2
    for each in runs.ranks:
        for stage in SHARDING_STAGES:
            assert each.other_nbytes[name, stage] == 0
            assert each.state_nbytes[name, stage] == tensors * SETTINGS[name].state_dtype.itemsize


def test_state_that_is_rounded_gives_other_numbers_than_state_that_is_not(runs: Runs) -> None:
    for stage in SHARDING_STAGES:
        fine, coarse = (runs.ranks[0].weights[f"bf16 {key}, FusedAdam", stage] for key in ("masters", "states"))
        assert relative_difference(fine, coarse) > 0


# -- LAMB: norms are summed in another order ---------------------------------------------------------------------------


def _lamb(rank: int, world_size: int, stage: int) -> tuple[dict[str, Tensor], float]:
    model = build(Mlp, dtype=BF16)
    optimizer = FusedLamb(model.parameters(), lr=RATE, weight_decay=0.1)
    engine = make_engine(
        model, config(ACCUMULATION, bf16={"enabled": True, **BF16_STATES}, **zero(stage)), optimizer=optimizer
    )
    return train(engine, _batches(BF16, world_size), rank).model_weights, _nbytes(engine)[0]


@pytest.mark.parametrize("stage", SHARDING_STAGES)
def test_lamb_keeps_its_moments_in_bf16_too(stage: int) -> None:
    setting = Setting("lamb", functools.partial(FusedLamb, lr=RATE, weight_decay=0.1), BF16_STATES, BF16)
    wanted = setting.reference(2, stage).model_weights
    for weights, state_nbytes in run_ranks(_lamb, 2, stage):
        assert state_nbytes == 2 * BF16.itemsize
        # The ratio is off by some fp32 roundings, so that now and then a weight rounds to its neighbour.
        assert relative_difference(weights, wanted) <= 2 * torch.finfo(BF16).eps


# -- saving and loading -----------------------------------------------------------------------------------------------


def _resumes(rank: int, world_size: int, folder: str, name: str) -> None:
    setting = SETTINGS[name]
    batches = _batches(setting.dtype, world_size)
    half = STEPS // 2

    def engine(stage: int) -> DeepSpeedEngine:
        model = build(Mlp, dtype=setting.dtype)
        return make_engine(
            model, config(ACCUMULATION, **setting.blocks, **zero(stage)), optimizer=setting.factory(model.parameters())
        )

    for stage in (1, 3):
        first = engine(stage)
        train(first, batches[:half], rank)
        first.save_checkpoint(f"{folder}/{stage}")
        wanted = train(first, batches[half:], rank)
        second = engine(stage)
        second.load_checkpoint(f"{folder}/{stage}")
        got = train(second, batches[half:], rank)
        assert relative_difference(got.model_weights, wanted.model_weights) == 0
        assert _nbytes(second) == _nbytes(first)


@pytest.mark.parametrize("name", ["bf16 masters, FusedAdam", "bf16 states, FusedAdam", "fp16 masters, torch's AdamW"])
def test_a_run_continues_bit_for_bit_from_its_checkpoint(tmp_path: Path, name: str) -> None:
    run_ranks(_resumes, 2, str(tmp_path), name)


# -- where gradients are added up -------------------------------------------------------------------------------------

ACCUMULATED: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16 model": (BF16, {"bf16": {"enabled": True}}),
    "bf16 model and masters": (BF16, {"bf16": {"enabled": True, **BF16_MASTERS}}),
    "fp32 model": (FP32, {}),
}
OTHER = {BF16: "fp32", FP32: "bf16"}
MICRO_BATCHES = 4  # a sum of two bf16 numbers that are added in fp32 and rounded once is the same


def _accumulates(rank: int, world_size: int, name: str) -> dict[tuple[int, bool], tuple[dict[str, Tensor], torch.dtype]]:
    dtype, blocks = ACCUMULATED[name]
    batches = cast_batches(make_batches(build(Mlp), STEPS, MICRO_BATCHES, world_size), dtype)
    found = {}
    for stage in SHARDING_STAGES if "masters" in name else (0, *SHARDING_STAGES):
        for is_given in (False, True):
            model = build(Mlp, dtype=dtype)
            extra = {"data_types": {"grad_accum_dtype": OTHER[dtype]}} if is_given else {}
            settings = config(MICRO_BATCHES, **blocks, **extra, **zero(stage, stage3_param_persistence_threshold=10))
            engine = make_engine(model, settings, optimizer=TORCHS(model.parameters()))
            weights = train(engine, batches, rank).weights
            kept_in = {flat.gradients.dtype for flat in engine._parts.partition.trained}
            assert len(kept_in) == 1
            found[stage, is_given] = (weights, kept_in.pop())
            engine.destroy()
    return found


def _with_bf16_masters(params: Iterable[nn.Parameter]) -> Any:
    return Rounding(TORCHS(params), BF16, rounds_state=False)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", ACCUMULATED)
def test_gradients_are_added_up_in_the_format_of_the_key(name: str, world_size: int) -> None:
    dtype, _ = ACCUMULATED[name]
    other = {"fp32": FP32, "bf16": BF16}[OTHER[dtype]]
    batches = cast_batches(make_batches(build(Mlp), STEPS, MICRO_BATCHES, world_size), dtype)
    for found in run_ranks(_accumulates, world_size, name):
        for stage, is_given in found:
            weights, kept_in = found[stage, is_given]
            assert kept_in == (other if is_given else dtype)
            wanted = train_reference(
                build(Mlp, dtype=dtype),
                _with_bf16_masters if "masters" in name else TORCHS,
                batches,
                dtype=dtype if dtype == BF16 else None,
                accumulation_dtype=other if is_given else None,
                communication_dtype=dtype,
                averages_each_micro_batch=stage >= 2,
            )
            # fp32 arithmetic alone: masters differ in their last places at most, or not at all where they are 16-bit.
            assert relative_difference(weights, wanted.weights) <= (0 if "masters" in name else 1e-6)
            assert relative_difference(weights, found[stage, not is_given][0]) > 1e-5
