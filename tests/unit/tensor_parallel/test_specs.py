"""Rules as objects, and what `tp_model_init` records."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.config.parallel import PartitionConfig
from deepspeed.errors import ArgumentError
from deepspeed.module_inject import AutoTPConfig, AutoTPPresets, PartitionType, TPLayerSpec, merge_autotp_configs
from deepspeed.tensor_parallel import recorded


def test_objects_become_the_config_and_come_back() -> None:
    config = AutoTPConfig(
        tp_size=2,
        layer_specs=[
            TPLayerSpec([r"qkv\.weight$"], PartitionType.COLUMN, shape=((6, 3, 3), -1), partition_dim=0),
            TPLayerSpec([r"norm\.weight$"], PartitionType.SKIP, grad_allreduce=True, model_types=["llama"]),
        ],
        use_default_specs=False,
    )
    parsed = PartitionConfig.model_validate(config.to_dict())
    assert parsed.layer_specs[0].shape == [[6, 3, 3], -1]
    assert parsed.layer_specs[1].partition_type == "skip"
    assert AutoTPConfig.from_dict(config.to_dict()) == config


def test_presets_are_rules_that_the_config_takes() -> None:
    for name in ("llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"):
        preset = getattr(AutoTPPresets, name)()
        assert PartitionConfig.model_validate(preset.to_dict()).layer_specs
        assert {spec.partition_type for spec in preset.layer_specs} == {PartitionType.COLUMN, PartitionType.ROW}
    with pytest.raises(ArgumentError, match=r"no preset 'opt'.*llama, qwen2"):
        AutoTPPresets.get_preset("opt")


def test_merged_rules_are_those_of_the_second_before_those_of_the_first() -> None:
    router = TPLayerSpec(["router"], PartitionType.SKIP)
    merged = merge_autotp_configs(AutoTPPresets.llama(), AutoTPConfig(layer_specs=[router], strict_mode=True))
    assert merged.layer_specs == [router, *AutoTPPresets.llama().layer_specs]
    assert merged.strict_mode
    assert merged.use_default_specs
    assert merge_autotp_configs(AutoTPConfig(tp_size=4), AutoTPConfig()).tp_size == 4


def test_what_is_said_of_a_model_is_found_again() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert deepspeed.tp_model_init(model=model, tp_size=2, dtype=torch.bfloat16, config={"steps_per_print": 1}) is model
    found = recorded.recorded_for(model)
    assert found is not None
    assert (found.tp_size, found.dtype, found.config) == (2, torch.bfloat16, {"steps_per_print": 1})
    assert recorded.recorded_for(other) is None
    assert deepspeed.tp_model_init(model, 2, torch.bfloat16) is model


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tp_size": 0}, r"tp_size=0.*at least 1"),
        ({"tp_size": True}, r"tp_size=True.*at least 1"),
        ({"tp_group": object(), "mpu": object()}, r"both tp_group and mpu.*one of the two"),
        ({"group": object()}, r"got group; it takes config, tp_group and mpu"),
        ({"tp_size": 4}, r"tp_size=4.*called with tp_size=2.*Call it once"),
    ],
)
def test_what_makes_no_sense_is_refused(keys: dict[str, Any], message: str) -> None:
    model = nn.Linear(2, 2)
    deepspeed.tp_model_init(model, 2, torch.float32)
    with pytest.raises(ArgumentError, match=message):
        deepspeed.tp_model_init(model, **{"tp_size": 2, "dtype": torch.float32, **keys})


def test_the_switch_is_remembered() -> None:
    assert not recorded.is_autotp_training()
    deepspeed.set_autotp_mode(training=True)
    assert recorded.is_autotp_training()
    deepspeed.set_autotp_mode()
    assert not recorded.is_autotp_training()
