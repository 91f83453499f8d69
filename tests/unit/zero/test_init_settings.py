from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.config import DeepSpeedConfig
from deepspeed.config.offload import OffloadDeviceEnum
from deepspeed.errors import ArgumentError, ConfigError
from deepspeed.zero.init_settings import read_settings

HALF_FILLED = {
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "fp16": {"enabled": "auto", "loss_scale_window": "auto"},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_max_live_parameters": "auto",
        "stage3_param_persistence_threshold": "auto",
        "offload_param": {"device": "none", "nvme_path": None, "buffer_size": "auto"},
        "leaf_module": "auto",
    },
    "steps_per_print": float("inf"),
    "a key that nobody knows": 1,
}


def test_a_config_that_a_client_has_not_filled_in_yet_is_enough() -> None:
    settings = read_settings(HALF_FILLED)
    assert settings.dtype is torch.bfloat16
    assert not settings.is_remote
    assert settings.override_module_apply
    assert settings.max_live_numel == 10**9


@pytest.mark.parametrize("form", ["path", "base64", "object"])
def test_every_form_of_a_config_is_read(form: str, tmp_path: Path) -> None:
    config = {"train_batch_size": 1, "bfloat16": {"enabled": True}, "zero_optimization": {"override_module_apply": False}}
    text = json.dumps(config)
    path = tmp_path / "config.json"
    path.write_text(text)
    source: Any = {
        "path": path,
        "base64": base64.urlsafe_b64encode(text.encode()).decode(),
        "object": DeepSpeedConfig(config),
    }[form]
    settings = read_settings(source)
    assert settings.dtype is torch.bfloat16
    assert not settings.override_module_apply


def test_the_dtype_is_the_argument_else_the_configs_else_full_precision() -> None:
    assert read_settings({"fp16": {"enabled": True}}, dtype=torch.float64).dtype is torch.float64
    assert read_settings({"fp16": {"enabled": True}}).dtype is torch.float16
    assert read_settings().dtype is torch.float32
    torch.set_default_dtype(torch.bfloat16)  # as clients do while they build a model
    assert read_settings().dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    assert read_settings().dtype is torch.float64


def test_shards_rest_on_the_host_when_the_argument_or_the_config_says_so() -> None:
    offload = {"zero_optimization": {"offload_param": {"device": "cpu", "pin_memory": True}}}
    assert read_settings(offload).is_remote
    assert read_settings(offload).pin_memory
    assert not read_settings(offload, remote_device="none").is_remote
    assert read_settings(remote_device=OffloadDeviceEnum.cpu).is_remote
    with pytest.raises(ArgumentError, match='needed None, "cpu" or "nvme"'):
        read_settings(remote_device="disk")


def test_shards_rest_in_a_file_when_the_argument_or_the_config_says_so() -> None:
    offload = {"device": "nvme", "nvme_path": "/fast", "max_in_cpu": 7}
    config = {"zero_optimization": {"offload_param": offload}, "aio": {"queue_depth": 3}}
    settings = read_settings(config)
    assert (settings.is_remote, settings.nvme_path, settings.max_in_cpu) == (True, Path("/fast"), 7)
    assert settings.io.queue_depth == 3
    assert read_settings(config, remote_device="cpu").nvme_path is None
    only_a_path = {"zero_optimization": {"offload_param": {"nvme_path": "/fast"}}}
    assert read_settings(only_a_path, remote_device="nvme").nvme_path == Path("/fast")
    with pytest.raises(ArgumentError, match=r"has no zero_optimization\.offload_param\.nvme_path"):
        read_settings(remote_device="nvme")


def test_faults_of_the_blocks_are_told_together() -> None:
    with pytest.raises(ConfigError, match="2 faults in the configuration") as caught:
        read_settings({"zero_optimization": {"stge": 3}, "fp16": {"enabled": "perhaps"}})
    assert 'Did you mean "stage"?' in str(caught.value)
    with pytest.raises(ArgumentError, match="both true"):
        read_settings({"fp16": {"enabled": True}, "bf16": {"enabled": True}})
