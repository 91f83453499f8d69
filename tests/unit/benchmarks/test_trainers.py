"""The contenders: torch's peers of the ZeRO stages train what DDP trains, and each engine gets its own keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.cases import ORIGINAL, OURS, Case, Measured
from benchmarks.harness.ranks import Interpreters, run_case
from benchmarks.harness.trainers import (
    DDP,
    FSDP,
    FSDP_KEPT,
    OURS_AT_STAGE,
    OURS_REGATHERING,
    PEER_OF_STAGE,
    ZERO_REDUNDANCY,
    Training,
    contenders_at_stage,
    engine_config,
)
from benchmarks.run import choose

_TINY = {"width": 16, "layers": 2, "heads": 2, "vocabulary": 32, "positions": 8}


def _train(contender: str, work: Path, accumulation: int) -> Measured:
    arguments = {"model": _TINY, "accumulation": accumulation, "warm": 1, "steps": 2}
    case = Case("t", "train_step", (contender,), ("step_ms",), of=contender, ranks=2, arguments=arguments)
    run = run_case(case, contender, 0, Interpreters(work))
    assert run.measured is not None, run.error
    return run.measured


@pytest.fixture(scope="module")
def of_ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    return _train(DDP, tmp_path_factory.mktemp("ddp"), 2).losses


@pytest.mark.parametrize("peer", [ZERO_REDUNDANCY, FSDP_KEPT, FSDP])
def test_a_peer_trains_what_ddp_trains(peer: str, of_ddp: dict[str, float], tmp_path: Path) -> None:
    losses = _train(peer, tmp_path, 2).losses
    # Only the order of sums differs: some units of fp32 (6e-8) per step in a loss of 3.5, times three steps.
    assert losses == pytest.approx(of_ddp, rel=1e-5)
    assert losses["last"] < losses["first"]


def test_training_is_read_from_the_arguments_of_a_case() -> None:
    training = Training.of({"stage": 3, "zero": {"key": 1}, "dtype": "bf16", "warm": 2})
    assert training == Training(dtype="bf16", stage=3, zero={"key": 1})


def test_regathering_differs_from_ours_in_one_key_and_the_original_in_none() -> None:
    training = Training(stage=3, zero={"stage3_param_persistence_threshold": 0})
    blocks = {who: engine_config(who, training)["zero_optimization"] for who in (OURS, OURS_REGATHERING, ORIGINAL)}
    assert blocks[OURS] == blocks[ORIGINAL] == {"stage": 3, "stage3_param_persistence_threshold": 0}
    assert blocks[OURS_REGATHERING] == {**blocks[OURS], "stage3_max_reuse_distance": 0}


def test_who_meets_at_a_stage() -> None:
    assert contenders_at_stage(1, "more") == (OURS, ZERO_REDUNDANCY, "more", ORIGINAL)
    assert contenders_at_stage(3) == (OURS, OURS_REGATHERING, FSDP, ORIGINAL)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_step_is_measured_against_the_peer_and_the_original_of_its_stage(stage: int) -> None:
    cases = choose([f"zero_step stage {stage}"])
    assert {(c.arguments["dtype"], c.arguments["accumulation"]) for c in cases} == {
        (dtype, accumulation) for dtype in ("bf16", "fp32") for accumulation in (1, 4)
    }
    for case in cases:
        assert case.arguments["stage"] == stage
        assert {(goal.contender, goal.of) for goal in case.goals} == {
            (OURS_AT_STAGE[stage], PEER_OF_STAGE[stage]),
            (OURS_AT_STAGE[stage], ORIGINAL),
        }
        assert {name for goal in case.goals for name in goal.needs} <= set(case.contenders)
