"""The functions that schedulers call."""

from __future__ import annotations

import json
from typing import Any

import pytest

import deepspeed
from deepspeed.elasticity import (
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)

VERSION = deepspeed.__version__


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "DEEPSPEED_ELASTICITY_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def config(**more: Any) -> dict[str, Any]:
    limits = {"max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}
    return {"elasticity": {"enabled": True, "version": 0.1} | limits | more}


def test_a_batch_and_its_counts() -> None:
    batch, counts = compute_elastic_config(config(), VERSION)
    assert (batch, len(counts)) == (1680, 32)


@pytest.mark.parametrize("asked", [{}, {"return_microbatch": True}])
def test_a_world_size_gives_the_micro_batch_too(asked: dict[str, bool]) -> None:
    assert compute_elastic_config(config(), VERSION, world_size=60, **asked)[::2] == (1680, 4)


def test_a_common_multiple_above_the_limit_is_no_batch() -> None:
    assert compute_elastic_config(config(max_train_batch_size=100, micro_batch_sizes=[8, 10, 12]), VERSION)[0] == 96


def test_a_world_size_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ElasticityIncompatibleWorldSize):
        compute_elastic_config(config(), VERSION, world_size=64)


def test_a_micro_batch_without_ranks_is_refused_and_not_divided_by_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ElasticityConfigError, match="return_microbatch without world_size"):
        compute_elastic_config(config(), VERSION, return_microbatch=True)
    monkeypatch.setenv("WORLD_SIZE", "60")
    assert compute_elastic_config(config(), VERSION, return_microbatch=True)[2] == 4


def test_version_2_asks_the_job_for_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    elastic = config(max_train_batch_size=16, micro_batch_sizes=[2, 4], version=0.2)
    assert compute_elastic_config(elastic, VERSION) == (16, [1, 2, 4, 8])
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert compute_elastic_config(elastic, VERSION) == (12, [3])


@pytest.mark.parametrize(
    ("given", "reason"),
    [({}, "no block elasticity"), ({"elasticity": {}}, "not enabled"), (config(micro_batch_sizes=[0]), "micro_batch_sizes")],
)
def test_a_config_without_a_usable_block_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ElasticityConfigError, match=reason):
        compute_elastic_config(given, VERSION)


@pytest.mark.parametrize("version", ["0.3.7", "0.2", "new"])
def test_versions_without_elasticity_are_refused(version: str) -> None:
    with pytest.raises(ElasticityError, match=r"needed 0\.3\.8 or newer"):
        compute_elastic_config(config(), version)


@pytest.mark.parametrize("version", ["0.3.8", "0.19.8+abc", "1.0.0.dev0", "2.1"])
def test_later_versions_are_taken(version: str) -> None:
    assert compute_elastic_config(config(), version)[0] == 1680


def test_enabled_means_enabled() -> None:
    assert elasticity_enabled(config())
    assert not elasticity_enabled({"elasticity": {"enabled": False}})
    assert not elasticity_enabled({})


def test_the_block_as_an_object() -> None:
    assert ElasticityConfig(config()["elasticity"]).micro_batch_sizes == [2, 4, 6]
    with pytest.raises(ElasticityConfigError, match=r"elasticity\.max_train_batch_size.*micro_batch_sizes"):
        ElasticityConfig({"enabled": True})


def test_what_the_scheduler_was_told_must_be_what_the_job_has(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = config()["elasticity"]
    ensure_immutable_elastic_config(ours)
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(ours | {"min_gpus": 4}))
    ensure_immutable_elastic_config(ours)
    for key, other in {"max_train_batch_size": 3000, "micro_batch_sizes": [2, 4], "version": 0.2}.items():
        with pytest.raises(ElasticityConfigError, match=f"elasticity.{key} is .* the scheduler was told"):
            ensure_immutable_elastic_config(ours | {key: other})


@pytest.mark.parametrize(("text", "reason"), [("{", "is no JSON"), ("[1]", "holds a list")])
def test_a_scheduler_that_says_something_else_is_settled(monkeypatch: pytest.MonkeyPatch, text: str, reason: str) -> None:
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", text)
    with pytest.raises(ElasticityConfigError, match=reason):
        ensure_immutable_elastic_config(config()["elasticity"])
