"""Every ZeRO stage trains as one process does: precision x ranks x accumulation x clipping x model.

One launch per world size runs every setting. Each rank computes a share of the references (plain torch, no line of the
library); the test compares.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.common.pytree import map_tensors
from tests.support.engines import Outcome, config, make_engine, moments, train, zero
from tests.support.models import Batches, Branching, Lora, TiedGpt, TinyModel, build, cast_batches, make_batches
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, Reference, relative_difference, train_reference

STAGES = (0, 1, 2, 3)
AVERAGES_EACH_MICRO_BATCH = 2
"""The ZeRO stage from which on ranks are averaged at each micro-batch, not at the boundary."""

STEPS = 20
WORLD_SIZES = (1, 2, 3, 4)
CLIP = 0.05
LOSS_SCALE = 256.0
RATE = 1e-2  # Adam's
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": functools.partial(torch.optim.AdamW, lr=RATE, weight_decay=0.1),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
MODELS: dict[str, Callable[[], TinyModel]] = {
    "gpt": functools.partial(TiedGpt, blocks=1),  # with two the matrix takes half as long again; situations have two
    "lora": Lora,
    "branch": Branching,
}
PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Setting:
    """One training of the matrix, at every stage; `number` is its place there and decides what is not crossed."""

    number: int
    precision: str
    accumulation: int
    is_clipped: bool
    model: str

    @property
    def optimizer(self) -> str:
        """Adam or SGD, alternately: each is seen with each precision, accumulation, clipping and model."""
        return ("adam", "sgd")[(self.accumulation + self.is_clipped + list(MODELS).index(self.model)) % 2]

    @property
    def dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision]

    @property
    def is_16_bit(self) -> bool:
        return self.dtype.itemsize == 2

    @property
    def needs_place_of_average(self) -> bool:
        """Whether averaging each micro-batch rounds otherwise than averaging their sum, beyond the tolerance."""
        return self.is_16_bit and self.accumulation > 1

    @property
    def tolerance(self) -> float:
        """Most that masters may differ from the reference's, relative to the largest.

        fp32: 6e-8 per operation, and the order of sums over ranks differs; Adam divides by sqrt(v), which amplifies it
        where gradients are near zero. 16 bits: every rounding is at the same place, so without clipping only fp32
        arithmetic remains. With clipping the norm is summed in another order; masters then differ in the last bit of
        fp32, now and then one rounds to the neighbouring 16-bit weight, and later gradients are off by a last place each:
        in STEPS steps, of RATE each (Adam) or of CLIP (SGD: 0.1 x 1 / (1 - 0.9) x CLIP), at most the bound below.
        """
        if self.precision == "fp64":
            return FP64_ROUNDING
        if self.is_16_bit and self.is_clipped:
            return STEPS * {"adam": RATE, "sgd": CLIP}[self.optimizer] * torch.finfo(self.dtype).eps
        return {"adam": 1e-5, "sgd": 1e-6}[self.optimizer]

    def build(self) -> TinyModel:
        """The model; a 16-bit one starts in fp32, so that masters keep what 16 bits cannot."""
        return build(MODELS[self.model], dtype=torch.float32 if self.is_16_bit else self.dtype)

    def batches(self, world_size: int) -> Batches:
        return cast_batches(make_batches(self.build(), STEPS, self.accumulation, world_size), self.dtype)

    def blocks(self, stage: int) -> dict[str, Any]:
        """The config: small buckets in half of the settings; at stage 3 the keys that decide what is gathered when."""
        keys: dict[str, Any] = {"reduce_bucket_size": 150} if self.number % 2 else {}
        if stage == 3:
            keys |= _STAGE_3_KEYS[self.number % len(_STAGE_3_KEYS)]
        blocks: dict[str, Any] = zero(stage, **keys) | {"gradient_clipping": CLIP if self.is_clipped else 0.0}
        if self.precision == "bf16":
            blocks["bf16"] = {"enabled": True}
        if self.precision == "fp16":
            blocks["fp16"] = {"enabled": True, "loss_scale": LOSS_SCALE}
        return blocks


_STAGE_3_KEYS: tuple[dict[str, Any], ...] = (
    {"stage3_param_persistence_threshold": 0},
    {"stage3_param_persistence_threshold": 50, "stage3_max_reuse_distance": 0},
    {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0},
    {},
    {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 300, "stage3_prefetch_bucket_size": 100},
)


def _settings() -> Iterator[Setting]:
    crossed = itertools.product(PRECISIONS, (1, 3), (False, True), MODELS)
    return itertools.starmap(Setting, ((number, *each) for number, each in enumerate(crossed)))


@dataclass
class Trained:
    """What one rank brings back, by setting and stage, and those references that were its share.

    `digests` are of everything that must be the same on all ranks; the tensors themselves come from rank 0 alone.
    """

    losses: dict[tuple[Setting, int], list[float]] = field(default_factory=dict)
    digests: dict[tuple[Setting, int], str] = field(default_factory=dict)
    outcomes: dict[tuple[Setting, int], tuple[Outcome, dict[str, dict[str, Tensor]]]] = field(default_factory=dict)
    references: dict[tuple[Setting, bool], Reference] = field(default_factory=dict)


def _train_all(rank: int, world_size: int, stages: tuple[int, ...]) -> Trained:
    trained = Trained()
    turns = itertools.cycle(range(world_size))
    for setting in _settings():
        batches = setting.batches(world_size)
        for stage in stages:
            model = setting.build()
            optimizer = OPTIMIZERS[setting.optimizer]([p for p in model.parameters() if p.requires_grad])
            engine = make_engine(model, config(setting.accumulation, **setting.blocks(stage)), optimizer=optimizer)
            outcome, state = train(engine, batches, rank), moments(engine)
            engine.destroy()
            trained.losses[setting, stage], outcome.losses = outcome.losses, []
            trained.digests[setting, stage] = hashlib.sha256(pickle.dumps(_plain((vars(outcome), state)))).hexdigest()
            if rank == 0:
                trained.outcomes[setting, stage] = (outcome, state)
        for each in {False, setting.needs_place_of_average}:
            if next(turns) == rank:
                trained.references[setting, each] = _reference(setting, batches, averages_each_micro_batch=each)
    return trained


def _plain(tree: Any) -> Any:
    """`tree` with bytes in place of tensors."""
    return map_tensors(lambda tensor: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), tree)


def _reference(setting: Setting, batches: Batches, *, averages_each_micro_batch: bool) -> Reference:
    return train_reference(
        setting.build(),
        OPTIMIZERS[setting.optimizer],
        batches,
        clip=CLIP if setting.is_clipped else None,
        dtype=setting.dtype if setting.is_16_bit else None,
        loss_scale=LOSS_SCALE if setting.precision == "fp16" else 1.0,
        averages_each_micro_batch=averages_each_micro_batch,
        unused_counts_as_zero=True,  # the flat buffers hold zero for what nobody used
    )


@dataclass
class Matrix:
    """All results of one world size."""

    ranks: list[Trained]

    def reference(self, setting: Setting, stage: int) -> Reference:
        """Plain torch's run that rounds where `stage` does."""
        key = (setting, stage >= AVERAGES_EACH_MICRO_BATCH and setting.needs_place_of_average)
        return next(each.references[key] for each in self.ranks if key in each.references)

    def differences(self, setting: Setting, stage: int) -> Iterator[tuple[str, float, float]]:
        """What is compared: (its name, relative difference, most it may be)."""
        outcome, state = self.ranks[0].outcomes[setting, stage]
        wanted, bound = self.reference(setting, stage), setting.tolerance
        may_flip = setting.is_16_bit and setting.is_clipped
        place = torch.finfo(setting.dtype).eps if may_flip else 0.0  # what a 16-bit number moves when it rounds otherwise
        yield "masters", relative_difference(outcome.weights, wanted.weights), bound
        yield "weights", relative_difference(outcome.model_weights, wanted.model_weights), bound + place
        losses = torch.tensor([each.losses[setting, stage] for each in self.ranks], dtype=torch.float64).mean(0)
        per_step = losses.view(STEPS, setting.accumulation).mean(1).tolist()
        for name, got, want in (("norms", outcome.norms, wanted.norms), ("losses", per_step, wanted.losses)):
            yield name, max(abs(g - w) / abs(w) for g, w in zip(got, want, strict=True)), 10 * bound + place
        if not may_flip:  # else a moment is off by what the gradients are, of which there is no bound relative to it
            for key in {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}[setting.optimizer]:
                got_state = {name: each[key] for name, each in state.items()}
                want_state = {name: each[key] for name, each in wanted.state.items()}
                yield key, relative_difference(got_state, want_state), 10 * bound


@pytest.fixture(scope="module", params=WORLD_SIZES, ids="{} ranks".format)
def matrix(request: pytest.FixtureRequest) -> Matrix:
    """Every setting at every stage, trained once for all tests of one world size."""
    return Matrix(run_ranks(_train_all, request.param, STAGES, timeout_seconds=900))


def test_every_setting_trains_as_one_process_does(matrix: Matrix) -> None:
    worst = [
        f"stage {stage} {setting}: {name} off by {off:.2g}, may be {bound:.2g}"
        for setting, stage in matrix.ranks[0].outcomes
        for name, off, bound in matrix.differences(setting, stage)
        if not off <= bound
    ]
    assert worst == []
    assert len(matrix.ranks[0].outcomes) == len(list(_settings())) * len(STAGES)


def test_all_ranks_end_with_the_same_bits(matrix: Matrix) -> None:
    first, *others = (each.digests for each in matrix.ranks)
    assert [key for other in others for key, digest in other.items() if digest != first[key]] == []


def test_every_clipping_setting_really_clips(matrix: Matrix) -> None:
    clipped = [outcome.norms for (setting, _), (outcome, _) in matrix.ranks[0].outcomes.items() if setting.is_clipped]
    assert clipped
    assert all(min(norms) > CLIP for norms in clipped)


def test_sixteen_bit_masters_keep_more_than_the_weights(matrix: Matrix) -> None:
    for (setting, _), (outcome, _) in matrix.ranks[0].outcomes.items():
        if setting.is_16_bit:
            rounded = {name: outcome.model_weights[name] for name in outcome.weights}
            assert all(torch.equal(outcome.weights[name].to(setting.dtype), weight) for name, weight in rounded.items())
            assert relative_difference(rounded, outcome.weights) > 0


def test_all_stages_give_the_same_bits_where_nothing_is_summed_in_another_order(matrix: Matrix) -> None:
    # One micro-batch: every stage sums the same numbers over ranks in the same order. Without clipping the norm, which each
    # stage sums over other parts, does not come into the weights.
    compared = [s for s in _settings() if s.accumulation == 1 and not s.is_clipped]
    assert len(compared) == len(PRECISIONS) * len(MODELS)
    assert [(s, stage) for s in compared for stage in STAGES if not _same(matrix, s, stage)] == []


def _same(matrix: Matrix, setting: Setting, stage: int) -> bool:
    (outcome, state), (wanted, wanted_state) = (matrix.ranks[0].outcomes[setting, each] for each in (stage, 0))
    pairs = [(outcome.weights, wanted.weights), (outcome.model_weights, wanted.model_weights)]
    pairs += [(state[name], wanted_state[name]) for name in wanted_state]
    return all(relative_difference(got, want) == 0.0 for got, want in pairs)
