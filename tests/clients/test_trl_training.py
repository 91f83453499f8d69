"""TRL's trainers with us log what they log under DDP: supervised, preferences, rewards, and generation in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.trl_runs import TRAINERS, Run, Trained, assert_same_training, save_models, trained

pytest.importorskip("trl", reason="trl is not installed: pip install deepspeed[clients]")
pytest.importorskip("peft", reason="peft is not installed: pip install deepspeed[clients]")

_EVERY, _NONE = 0, 10**6  # of the parameters are sharded; with "auto" some are, as in any model of use
_REFERENCES = [Run(trainer, None) for trainer in TRAINERS]
_RUNS = [
    *[Run(trainer, stage) for trainer in TRAINERS for stage in (2, 3)],
    *[Run(trainer, 3, numel) for trainer in ("sft", "grpo") for numel in (_EVERY, _NONE)],
]


def _in_turn(rank: int, world_size: int, folder: Path) -> dict[Run, Trained]:
    import accelerate  # noqa: F401 - the ranks' group is started by it, in `arguments`

    return {run: trained(run, folder) for run in (*_REFERENCES, *_RUNS)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Run, Trained]]:
    """Every run in one process for each rank: loading TRL takes as long as ten runs, and engines follow each other."""
    folder = tmp_path_factory.mktemp("runs")
    save_models(folder)
    found: list[dict[Run, Trained]] = run_ranks(_in_turn, 2, folder, init=False, timeout_seconds=500)
    return found


@pytest.mark.parametrize("run", _RUNS, ids=str)
def test_a_trainer_trains_as_it_does_under_ddp(results: list[dict[Run, Trained]], run: Run) -> None:
    for rank, of_rank in enumerate(results):
        assert_same_training(of_rank[run], of_rank[Run(run.trainer, None)])
        assert bool(of_rank[run].saved) is (rank == 0)


def test_rewards_differ_so_that_there_is_something_to_learn(results: list[dict[Run, Trained]]) -> None:
    for of_rank in results:
        rows = of_rank[Run("grpo", None)].rows[:-1]
        assert all(row["reward_std"] > 0 for row in rows)
        assert any(row["kl"] != 0 for row in rows)
