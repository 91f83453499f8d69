"""A whole configuration whose batch `elasticity` chooses."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ConfigError, ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize

ELASTIC = {"enabled": True, "max_train_batch_size": 24, "micro_batch_sizes": [1, 2]}


def config(ranks: int = 1, **more: Any) -> DeepSpeedConfig:
    return DeepSpeedConfig({"elasticity": ELASTIC | more.pop("elasticity", {}), **more}, dp_world_size=ranks)


@pytest.mark.parametrize(("ranks", "micro", "accumulation"), [(1, 2, 12), (4, 2, 3), (6, 2, 2), (24, 1, 1)])
def test_the_batch_stays_while_ranks_come_and_go(ranks: int, micro: int, accumulation: int) -> None:
    parsed = config(ranks)
    sizes = (parsed.train_batch_size, parsed.train_micro_batch_size_per_gpu, parsed.gradient_accumulation_steps)
    assert sizes == (24, micro, accumulation)


@pytest.mark.parametrize("key", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
def test_a_batch_size_besides_is_refused(key: str) -> None:
    with pytest.raises(ElasticityConfigError, match=f"{key} = 8: needed none"):
        config(**{key: 8})


def test_a_batch_size_besides_is_replaced_with_a_warning_where_that_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    parsed = config(2, train_batch_size=99, elasticity={"ignore_non_elastic_batch_info": True})
    assert (parsed.train_batch_size, parsed.gradient_accumulation_steps) == (24, 6)
    assert "train_batch_size = 99 is not used: elasticity chooses 24" in caplog.text


def test_ranks_that_do_not_fit_are_an_error_of_their_own() -> None:
    with pytest.raises(ElasticityIncompatibleWorldSize, match="5 data-parallel ranks"):
        config(5, elasticity={"version": 0.1})
    assert config(5).train_batch_size == 20


def test_all_faults_of_the_block_are_told_and_the_batch_is_not_missed_besides() -> None:
    with pytest.raises(ElasticityConfigError) as error:
        DeepSpeedConfig({"elasticity": {"enabled": True, "min_gpus": 4, "max_gpus": 2}})
    assert "3 faults" in str(error.value)
    assert isinstance(error.value, (ElasticityError, ConfigError))
    assert "Check batch" not in str(error.value)


def test_limits_that_leave_no_batch_are_an_error() -> None:
    with pytest.raises(ElasticityConfigError, match="no batch of up to 3 samples"):
        config(elasticity={"max_train_batch_size": 3, "micro_batch_sizes": [4], "version": 0.1})


def test_a_folder_to_go_on_from_needs_no_elastic_batch() -> None:
    parsed = DeepSpeedConfig({"train_batch_size": 4, "elasticity": {"auto_resume": "runs/a"}})
    assert str(parsed.elasticity.auto_resume) == "runs/a"
    assert parsed.train_micro_batch_size_per_gpu == 4
