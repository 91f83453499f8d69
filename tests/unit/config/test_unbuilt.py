"""Features that are not built yet."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed.config import DeepSpeedConfig
from deepspeed.config.unbuilt import NOTES, UNBUILT, status_of
from deepspeed.config.walk import sections
from deepspeed.errors import ConfigError, UnbuiltFeatureError

SWITCH_ON: dict[str, Any] = {
    "zero_optimization.stage": 3,
    "zero_optimization.zero_hpz_partition_size": 8,
    "zero_optimization.zeropp_loco_param": {},
    "zero_optimization.mics_shard_size": 8,
    "optimizer.type": "OneBitAdam",
    "sequence_parallel_size": 2,
    "tensor_parallel.autotp_size": 2,
    "tensor_parallel.tensor_parallel.tp_size": 2,
    "compile.passes": ["z3"],
    "sparse_attention": {},
    "compression_training": {"layer_reduction": {"enabled": True}},
    "weight_quantization": {},
}


def nested(path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {head: nested(rest, value) if rest else value}


def config_that_asks(key: str, only_with: str) -> dict[str, Any]:
    given = {"train_batch_size": 4} | nested(key, SWITCH_ON.get(key, True))
    if key == "curriculum_learning.enabled":
        schedule = {"min_difficulty": 1, "max_difficulty": 2, "schedule_type": "custom"}
        given["curriculum_learning"] |= schedule
    if key == "bf16.bf16_optimizer_states":
        given["bf16"] |= {"bf16_master_weights_and_grads": True}
    if only_with:
        head, _, rest = only_with.partition(".")
        given.setdefault(head, {})[rest] = 3 if rest == "stage" else True
    return given


@pytest.mark.parametrize("entry", UNBUILT, ids=lambda entry: entry.key)
def test_asking_for_a_feature_that_is_not_built_says_so(entry: Any) -> None:
    given = config_that_asks(entry.key, entry.only_with)
    with pytest.raises(ConfigError) as error:
        DeepSpeedConfig(given, world_size=2 if entry.key == "sequence_parallel_size" else 1)
    line = next(line for line in str(error.value).splitlines() if f" {entry.key} = " in line and "not built yet" in line)
    assert entry.instead in line


def test_the_error_is_one_that_callers_can_tell_apart() -> None:
    with pytest.raises(UnbuiltFeatureError) as error:
        DeepSpeedConfig({"train_batch_size": 1, "hybrid_engine": {"enabled": True}})
    assert isinstance(error.value, NotImplementedError)


@pytest.mark.parametrize("entry", [entry for entry in UNBUILT if entry.only_with], ids=lambda entry: entry.key)
def test_a_feature_of_a_stage_that_is_off_asks_for_nothing(entry: Any) -> None:
    given = {"train_batch_size": 4} | nested(entry.key, SWITCH_ON.get(entry.key, True))
    DeepSpeedConfig(given)


def test_every_entry_names_a_key_that_exists() -> None:
    keys = {f"{s.path}.{name}" if s.path else name for s in sections(DeepSpeedConfig) for name in s.model.model_fields}
    paths = {s.path for s in sections(DeepSpeedConfig)} | keys
    assert {entry.key for entry in UNBUILT} | {entry.only_with for entry in UNBUILT} | set(NOTES) <= paths


def test_statuses_follow_the_list() -> None:
    assert status_of("fp16.enabled") == "works"
    assert status_of("hybrid_engine.enabled") == status_of("hybrid_engine.max_out_tokens") == "not built yet"
    assert status_of("zero_optimization.offload_optimizer.ratio").startswith("works on the CPU")
    assert status_of("zero_optimization.max_live_parameters") == "works"
    assert status_of("zero_optimization.round_robin_gradients").startswith("accepted, no effect")
    assert status_of("zero_optimization.reduce_bucket_size") == "works"
