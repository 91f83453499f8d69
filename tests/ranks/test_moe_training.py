"""Experts that are spread over ranks train as one process does that holds them all."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.engines import Outcome, config, make_engine, train, zero
from tests.support.models import Batches, cast_batches, make_batches
from tests.support.moe_models import MoeNet, moe_net
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, Reference, relative_difference, train_reference
from tests.support.sweeps import IS_SWEEP

STEPS = 10
ROWS = 5
CLIP = 0.05
RATE = 0.01
STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Case:
    """One training; `number` decides what is not crossed."""

    number: int
    ep_size: int
    stage: int
    accumulation: int
    is_clipped: bool
    k: int
    precision: str = "fp64"
    experts: tuple[int, ...] = (4,)

    @property
    def dtype(self) -> torch.dtype:
        return {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[self.precision]

    @property
    def tolerance(self) -> float:
        """Most that masters may differ from the reference's, relative to the largest.

        fp32: only the order of sums differs, 6e-8 per operation; Adam divides by sqrt(v), which amplifies it where gradients
        are near zero. bf16: an expert's gradient is one product over the rows of all its ranks, rounded once, where the
        reference rounds per rank: gradients differ by a last place, in STEPS steps of RATE each.
        """
        return {"fp64": FP64_ROUNDING, "fp32": 1e-5, "bf16": 4 * STEPS * RATE * torch.finfo(torch.bfloat16).eps}[
            self.precision
        ]

    @property
    def compared_steps(self) -> int:
        """Steps whose loss and norm are compared. In bf16 the first: later, near a tie, a token may go elsewhere.

        One of ROWS tokens that does moves a rank's loss by a part that no rounding bounds, and weights by a step of it.
        """
        return 1 if self.precision == "bf16" else STEPS

    def model(self, ep_size: int | None = None) -> MoeNet:
        dtype = torch.float32 if self.precision == "bf16" else self.dtype
        return moe_net(self.experts, self.ep_size if ep_size is None else ep_size, dtype, k=self.k)

    def batches(self, world_size: int) -> Batches:
        return cast_batches(make_batches(self.model(1), STEPS, self.accumulation, world_size, ROWS), self.dtype)

    def settings(self) -> dict[str, Any]:
        keys: dict[str, Any] = {"reduce_bucket_size": 150} if self.number % 2 else {}
        if self.stage == 3:
            keys["stage3_param_persistence_threshold"] = (0, 50)[self.number // 2 % 2]
        blocks: dict[str, Any] = zero(self.stage, **keys) | {"gradient_clipping": CLIP if self.is_clipped else 0.0}
        if self.precision == "bf16":
            blocks["bf16"] = {"enabled": True}
        return config(self.accumulation, ROWS, **blocks)


def _optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=RATE, weight_decay=0.1)


def _cases(world_size: int) -> list[Case]:
    sizes = [size for size in (1, 2, 4) if world_size % size == 0]
    crossed = list(itertools.product(sizes, STAGES, (1, 2), (False, True), (1, 2)))
    chosen = crossed if IS_SWEEP else [each for number, each in enumerate(crossed) if (number * 5 + number // 8) % 8 < 2]
    cases = [Case(number, *each) for number, each in enumerate(chosen)]
    widest = sizes[-1]
    for number, (stage, precision) in enumerate(itertools.product(STAGES, ("fp32", "bf16"))):
        if IS_SWEEP or number % 2 == world_size % 2:
            cases.append(Case(number, widest, stage, 1 + number // 2 % 2, False, 1 + stage % 2, precision))
    pyramid = [Case(1, widest, stage, 1, True, 2, experts=(4, 8)) for stage in (STAGES if IS_SWEEP else (1, 3))]
    return cases + pyramid


@dataclass
class Trained:
    """What a rank brings back; references are spread over the ranks."""

    outcomes: dict[Case, Outcome] = field(default_factory=dict)
    references: dict[Case, Reference] = field(default_factory=dict)


def _train_all(rank: int, world_size: int) -> Trained:
    trained = Trained()
    turns = itertools.cycle(range(world_size))
    for case in _cases(world_size):
        batches = case.batches(world_size)
        model = case.model()
        engine = make_engine(model, case.settings(), optimizer=_optimizer(model.parameters()))
        trained.outcomes[case] = train(engine, batches, rank)
        engine.destroy()
        if next(turns) == rank:
            trained.references[case] = train_reference(
                case.model(1),
                _optimizer,
                batches,
                clip=CLIP if case.is_clipped else None,
                dtype=torch.bfloat16 if case.precision == "bf16" else None,
                averages_each_micro_batch=case.stage >= 2 and case.precision == "bf16",
                unused_counts_as_zero=True,
            )
    return trained


def _joined(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of all ranks by name; what several hold must be the same bits."""
    joined: dict[str, Tensor] = {}
    for of_rank in found:
        for name, value in of_rank.items():
            assert name not in joined or torch.equal(joined[name], value), name
            joined[name] = value
    return joined


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_experts_over_ranks_train_as_in_one_process(world_size: int) -> None:
    ranks = run_ranks(_train_all, world_size, timeout_seconds=170)
    cases = _cases(world_size)
    references = {case: reference for each in ranks for case, reference in each.references.items()}
    faults = []
    for case in cases:
        outcomes = [each.outcomes[case] for each in ranks]
        wanted, bound = references[case], case.tolerance
        norms = list(zip(outcomes[0].norms, wanted.norms, strict=True))[: case.compared_steps]
        off = {
            "masters": relative_difference(_joined([each.weights for each in outcomes]), wanted.weights),
            "norms": max(abs(got - want) / abs(want) for got, want in norms) / 10,
            "losses": _losses_off([each.losses for each in outcomes], case, wanted) / 10,
        }
        faults += [f"{case}: {name} off by {far:.2g}, may be {bound:.2g}" for name, far in off.items() if not far <= bound]
        assert len({tuple(each.norms) for each in outcomes}) == 1
        if case.is_clipped:
            assert min(wanted.norms) > CLIP
    assert faults == []
    assert len(cases) >= len(STAGES) * 2


def _losses_off(of_ranks: list[list[float]], case: Case, wanted: Reference) -> float:
    losses = torch.tensor(of_ranks, dtype=torch.float64).mean(0).view(STEPS, case.accumulation).mean(1).tolist()
    pairs = list(zip(losses, wanted.losses, strict=True))[: case.compared_steps]
    return max(abs(got - want) / abs(want) for got, want in pairs)
