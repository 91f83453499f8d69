"""Adapters of PEFT train with us as in one process, and are saved, loaded again and merged with the same effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.clients import assert_same_curve, tiny_llama
from tests.support.peft_runs import METHODS, UPDATES, Tuned, tuned, tuned_alone
from tests.support.ranks import run_ranks

pytest.importorskip("peft", reason="peft is not installed: pip install deepspeed[clients]")

_ZERO: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "stage 3, small parameters whole": {"stage": 3, "stage3_param_persistence_threshold": 320},
}
_ALONE = "alone"


def _in_turn(rank: int, world_size: int, folder: Path) -> dict[tuple[str, str], Tuned]:
    found = {}
    for method in METHODS:
        found[method, _ALONE] = tuned_alone(method, folder / "base", folder / f"{method} {rank}", world_size)
        for name, zero in _ZERO.items():
            found[method, name] = tuned(method, zero, folder / "base", folder / f"{method} {name}", rank, world_size)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Tuned]]:
    """Every method in one process for each rank: loading PEFT takes as long as ten of them."""
    folder = tmp_path_factory.mktemp("adapters")
    tiny_llama().save_pretrained(folder / "base")
    found: list[dict[tuple[str, str], Tuned]] = run_ranks(_in_turn, 2, folder, timeout_seconds=150)
    return found


@pytest.mark.parametrize("zero", _ZERO)
@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_trains_and_travels_as_in_one_process(
    results: list[dict[tuple[str, str], Tuned]], method: str, zero: str
) -> None:
    for of_rank in results:
        _assert_same(of_rank[method, zero], of_rank[method, _ALONE])


def _assert_same(got: Tuned, expected: Tuned) -> None:
    """Adapters agree in the mean: Adam makes rounding of a gradient near zero a step of the full rate, in few elements."""
    assert len(expected.losses) == UPDATES
    assert_same_curve(got.losses, expected.losses)
    assert (got.merged is None) is (expected.merged is None)
    values = [got.loaded, *got.in_place, *([got.merged] if got.merged is not None else [])]
    theirs = [expected.loaded, *expected.in_place, *([expected.merged] if expected.merged is not None else [])]
    assert values == pytest.approx(theirs, rel=0, abs=1e-5)
    assert got.saved.keys() == expected.saved.keys() != set()
    for name, tensor in expected.saved.items():
        assert got.saved[name].shape == tensor.shape, name
        assert (got.saved[name] - tensor).abs().mean() <= 1e-5, name


def test_the_budget_of_adalora_was_spent(results: list[dict[tuple[str, str], Tuned]]) -> None:
    for zero in (_ALONE, *_ZERO):
        kept = [tensor for name, tensor in results[0]["adalora", zero].saved.items() if name.endswith("lora_E")]
        assert sum(tensor.shape[0] for tensor in kept) < 6 * len(kept)  # resized to the ranks that were kept
