"""Every optimizer trains on shards as it does in one process: weights, norms and state by name.

One launch per world size trains every optimizer at every stage; the references (plain torch on whole parameters, no engine)
are computed by the test process.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepspeed
from deepspeed import comm
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.utils import safe_get_full_optimizer_state
from deepspeed.zero import master as master_module
from deepspeed.zero import parameter_sums
from tests.support.engines import Outcome, config, make_engine, train, zero
from tests.support.models import TinyModel, build, make_batches
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, Reference, relative_difference, train_reference

STAGES = (1, 2, 3)
WORLD_SIZES = (2, 3)
STEPS = 5
ACCUMULATION = 2
CLIP = 0.3
STATE_ROUNDING = 10 * FP64_ROUNDING  # second moments are squares of gradients, which are off by a few roundings already

Groups = list[dict[str, Any]]
torch_optim = torch.optim

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "FusedAdam": functools.partial(FusedAdam, weight_decay=0.1),
    "FusedAdam, L2": functools.partial(FusedAdam, adam_w_mode=False, weight_decay=0.1),
    "DeepSpeedCPUAdam": functools.partial(DeepSpeedCPUAdam, weight_decay=0.1),
    "DeepSpeedCPUAdagrad": DeepSpeedCPUAdagrad,
    "FusedLion": functools.partial(FusedLion, weight_decay=0.1),
    "DeepSpeedCPULion": DeepSpeedCPULion,
    "FusedLamb": functools.partial(FusedLamb, weight_decay=0.1),
    "FusedLamb, narrow": functools.partial(FusedLamb, min_coeff=0.5, max_coeff=1.5, max_grad_norm=0.05),
    "Adam": functools.partial(torch_optim.Adam, amsgrad=True),
    "AdamW": functools.partial(torch_optim.AdamW, weight_decay=0.1),
    "AdamW, fused": functools.partial(torch_optim.AdamW, fused=True),
    "Adagrad": functools.partial(torch_optim.Adagrad, initial_accumulator_value=0.1),
    "SGD": functools.partial(torch_optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, plain": torch_optim.SGD,
    "RMSprop": functools.partial(torch_optim.RMSprop, momentum=0.9, centered=True),
    "Adadelta": torch_optim.Adadelta,
    "Adamax": torch_optim.Adamax,
    "NAdam": torch_optim.NAdam,
    "RAdam": torch_optim.RAdam,
    "ASGD": functools.partial(torch_optim.ASGD, t0=2),
    "Rprop": torch_optim.Rprop,
}


class Mixed(TinyModel):
    """What is awkward to cut: tied weights, a layer nobody uses, a number, no elements, parameters smaller than a rank."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, width)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0))
        self.mix = nn.Linear(width, width)
        self.unused = nn.Linear(3, 5)
        self.head = nn.Linear(width, self.VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def batch(self, rows: int, seed: int) -> tuple[Tensor, ...]:
        return (torch.randint(self.VOCABULARY, (rows, 5), generator=torch.Generator().manual_seed(seed)),)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.embedding(tokens[:, :-1])) * self.scale)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten()) + self.nothing.sum()


def model() -> Mixed:
    return build(Mixed, dtype=torch.float64)


def groups(params: Iterable[nn.Parameter]) -> Groups:
    """Matrices at one rate, all else at another."""
    params = list(params)
    matrices = [p for p in params if len(getattr(p, "ds_shape", p.shape)) > 1]
    others = [p for p in params if not any(p is matrix for matrix in matrices)]
    return [{"params": matrices, "lr": 0.02}, {"params": others, "lr": 0.005}]


def make(name: str, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return OPTIMIZERS[name](groups(params))


def keys_of(reference: Reference) -> list[str]:
    """Keys of tensor state: told by a matrix, because a counter has the shape of a parameter that is a number."""
    shape = reference.weights["mix.weight"].shape
    state = reference.state.get("mix.weight", {})
    return [key for key, value in state.items() if isinstance(value, Tensor) and value.shape == shape]


@dataclass
class Trained:
    """Of one rank, by optimizer and stage."""

    outcomes: dict[tuple[str, int], Outcome] = field(default_factory=dict)
    states: dict[tuple[str, int], dict[str, dict[str, Tensor | None]]] = field(default_factory=dict)
    coefficients: dict[tuple[str, int], list[float]] = field(default_factory=dict)


def _train_all(rank: int, world_size: int, state_keys: dict[str, list[str]]) -> Trained:
    master_module.SUB_GROUP_NUMEL["cpu"] = 24  # this process ends with the test: several sub-groups, cutting parameters
    trained = Trained()
    batches = make_batches(model(), STEPS, ACCUMULATION, world_size)
    for name in OPTIMIZERS:
        for stage in STAGES:
            built = model()
            keys = {"reduce_bucket_size": 60, "stage3_param_persistence_threshold": 7}
            settings = config(ACCUMULATION, gradient_clipping=CLIP, **zero(stage, **keys))
            engine = make_engine(built, settings, optimizer=make(name, built.parameters()))
            trained.outcomes[name, stage] = train(engine, batches, rank)
            trained.states[name, stage] = {
                param_name: {key: safe_get_full_optimizer_state(param, key) for key in state_keys[name]}
                for param_name, param in engine.module.named_parameters()
            }
            if "Lamb" in name:
                trained.coefficients[name, stage] = engine.optimizer.get_lamb_coeffs()
            engine.destroy()
    return trained


@dataclass
class Runs:
    """All results of one world size."""

    ranks: list[Trained]
    references: dict[str, Reference]


@pytest.fixture(scope="module", params=WORLD_SIZES, ids="{} ranks".format)
def runs(request: pytest.FixtureRequest) -> Runs:
    batches = make_batches(model(), STEPS, ACCUMULATION, request.param)
    references, state_keys = {}, {}
    for name in OPTIMIZERS:
        references[name] = train_reference(
            model(), functools.partial(make, name), batches, clip=CLIP, unused_counts_as_zero=True
        )
        state_keys[name] = keys_of(references[name])
    return Runs(run_ranks(_train_all, request.param, state_keys, timeout_seconds=200), references)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_norms_are_those_of_one_process(runs: Runs, name: str, stage: int) -> None:
    wanted = runs.references[name]
    for each in runs.ranks:
        got = each.outcomes[name, stage]
        assert relative_difference(got.weights, wanted.weights) <= FP64_ROUNDING
        assert relative_difference(got.model_weights, wanted.model_weights) <= FP64_ROUNDING
        assert got.norms == pytest.approx(wanted.norms, rel=FP64_ROUNDING)
        assert min(got.norms) > CLIP  # or clipping was not tried


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_by_name_is_that_of_one_process(runs: Runs, name: str, stage: int) -> None:
    reference = runs.references[name]
    keys = keys_of(reference)
    assert bool(keys) == (name != "SGD, plain")
    for each in runs.ranks:
        for key in keys:
            got = {param_name: state[key] for param_name, state in each.states[name, stage].items()}
            assert got.pop("nothing") is None  # there is nothing to tell
            want = {param_name: reference.state[param_name][key] for param_name in got}
            assert relative_difference(got, want) <= STATE_ROUNDING  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", STAGES)
def test_the_bounds_of_lambs_trust_ratio_hold_on_shards(runs: Runs, stage: int) -> None:
    for each in runs.ranks:
        ratios = each.coefficients["FusedLamb, narrow", stage]
        assert ratios
        assert all(0.5 <= ratio <= 1.5 for ratio in ratios)
    found = {ratio for each in runs.ranks for ratio in each.coefficients["FusedLamb", stage]}
    assert any(not 0.5 <= ratio <= 1.5 for ratio in found)  # so that the narrow bounds changed something


class OneSmallParameter(TinyModel):
    """Four elements: at most one rank holds any."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(inputs[:, :4] * self.weight, targets[:, :4])


def _lamb_meetings(rank: int, world_size: int, stage: int) -> tuple[list[int], int, dict[str, Tensor]]:
    meetings: list[int] = []

    def all_reduce(tensor: Tensor, **options: Any) -> Any:
        meetings.append(tensor.numel())
        return comm.all_reduce(tensor, **options)

    parameter_sums.comm = types.SimpleNamespace(all_reduce=all_reduce)  # type: ignore[assignment]  # the process ends here
    built = build(OneSmallParameter, dtype=torch.float64)
    engine = make_engine(built, config(**zero(stage)), optimizer=FusedLamb(built.parameters(), lr=0.01))
    weights = train(engine, make_batches(built, 2, 1, world_size), rank).weights
    return meetings, len(engine.optimizer.master.slices), weights


@pytest.mark.parametrize("stage", STAGES)
def test_lamb_meets_once_per_step_also_on_ranks_that_hold_nothing(stage: int) -> None:
    built = build(OneSmallParameter, dtype=torch.float64)
    batches = make_batches(built, 2, 1, 3)
    wanted = train_reference(built, functools.partial(FusedLamb, lr=0.01), batches).weights
    found = run_ranks(_lamb_meetings, 3, stage)
    assert [parts for _, parts, _ in found] == [1, 0, 0]
    for meetings, _, weights in found:
        assert meetings == [2, 2]  # two sums of one parameter, at each of two steps
        assert relative_difference(weights, wanted) <= FP64_ROUNDING


# -- what is refused --------------------------------------------------------------------------------------------------


class Unknown(torch.optim.SGD):
    """Element-wise in truth, but a subclass may compute anything."""


def _refusals(rank: int, world_size: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for stage in (0, *STAGES):
        for kind in (torch.optim.Adafactor, torch.optim.LBFGS, Unknown):
            built = model()
            try:
                make_engine(built, config(**zero(stage)), optimizer=kind(built.parameters(), lr=0.1)).destroy()
            except ArgumentError as error:
                found.setdefault(kind.__name__, []).append(str(error))
            assert all(p.shape == q.shape for p, q in zip(built.parameters(), model().parameters(), strict=True))
    return found


def test_what_cannot_be_sharded_is_refused_before_the_model_is_touched() -> None:
    for found in run_ranks(_refusals, 2):
        assert len(found["Adafactor"]) == len(found["Unknown"]) == len(STAGES)
        assert len(found["LBFGS"]) == len(STAGES) + 1
        assert "per row and per column" in found["Adafactor"][0]
        assert "zero_allow_untested_optimizer" in found["Unknown"][0]


def _allowed(rank: int, world_size: int, stage: int) -> dict[str, Tensor]:
    built = model()
    settings = config(1, zero_allow_untested_optimizer=True, **zero(stage))
    engine = make_engine(built, settings, optimizer=Unknown(built.parameters(), lr=0.1))
    return train(engine, make_batches(built, 2, 1, world_size), rank).weights


def test_an_unknown_optimizer_that_is_allowed_trains_as_in_one_process() -> None:
    built = model()
    batches = make_batches(built, 2, 1, 2)
    wanted = train_reference(built, functools.partial(Unknown, lr=0.1), batches, unused_counts_as_zero=True).weights
    for stage in STAGES:
        for got in run_ranks(_allowed, 2, stage):
            assert relative_difference(got, wanted) <= FP64_ROUNDING


def _adds_a_group(rank: int, world_size: int, stage: int) -> None:
    built = model()
    own = make("AdamW", built.parameters())
    engine = make_engine(built, config(**zero(stage)), optimizer=own)
    late = {"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))], "lr": 0.1}
    for optimizer in (engine.optimizer, own):
        with pytest.raises(UsageError, match="rate 0 for those that start later") as error:
            optimizer.add_param_group(late)
        assert "state then starts anew" in str(error.value)
    assert len(own.param_groups) == 2
    engine.destroy()
    own.add_param_group(late)  # the client's again
    assert len(own.param_groups) == 3


@pytest.mark.parametrize("stage", [0, *STAGES])
def test_a_group_added_later_is_refused_with_what_to_do_instead(stage: int) -> None:
    run_ranks(_adds_a_group, 2, stage)


def _starts_late(rank: int, world_size: int, stage: int) -> dict[str, Tensor]:
    built = model()
    optimizer = make("SGD", built.parameters())
    optimizer.param_groups[1]["lr"] = 0.0
    engine = make_engine(built, config(**zero(stage)), optimizer=optimizer)
    batches = make_batches(built, 4, 1, world_size)
    train(engine, batches[:2], rank)
    engine.optimizer.param_groups[1]["lr"] = 0.05
    return train(engine, batches[2:], rank).weights


class _LateRate:
    """A schedule for the reference: the second group's rate is 0 for two steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.steps = 0
        optimizer.param_groups[1]["lr"] = 0.0

    def step(self) -> None:
        self.steps += 1
        self.optimizer.param_groups[1]["lr"] = 0.0 if self.steps < 2 else 0.05


def test_a_group_at_rate_0_starts_later() -> None:
    built = model()
    batches = make_batches(built, 4, 1, 2)
    make_sgd = functools.partial(make, "SGD")
    wanted = train_reference(built, make_sgd, batches, unused_counts_as_zero=True, scheduler_factory=_LateRate).weights
    for stage in STAGES:
        for got in run_ranks(_starts_late, 2, stage):
            assert relative_difference(got, wanted) <= FP64_ROUNDING


def _sharded_at_birth(rank: int, world_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    settings = config(1, **zero(3, stage3_param_persistence_threshold=0))
    with deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.float64):
        built = model()
    engine = make_engine(built, settings, optimizer=make("Adagrad", built.parameters()))
    outcome = train(engine, make_batches(built, 2, 1, world_size), rank)
    return outcome.weights, {name: safe_get_full_optimizer_state(p, "sum") for name, p in engine.module.named_parameters()}


def test_state_that_an_optimizer_makes_of_sharded_parameters_starts_at_its_own_value() -> None:
    batches = make_batches(model(), 2, 1, 2)
    wanted = train_reference(model(), functools.partial(make, "Adagrad"), batches, unused_counts_as_zero=True)
    sums = {name: state["sum"] for name, state in wanted.state.items() if name != "nothing"}
    for weights, got in run_ranks(_sharded_at_birth, 2):
        assert relative_difference(weights, wanted.weights) <= FP64_ROUNDING
        assert relative_difference({name: got[name] for name in sums}, sums) <= STATE_ROUNDING
