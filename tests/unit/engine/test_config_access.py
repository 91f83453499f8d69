"""Every question method of the engine has an answer for a plain config, and the right one for a set key."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.config_access import ConfigAccess


class Asked(ConfigAccess):
    def __init__(self, **keys: Any) -> None:
        self._config = DeepSpeedConfig({"train_batch_size": 1, **keys})


NAMES = sorted(name for name in vars(ConfigAccess) if not name.startswith("_"))


@pytest.mark.parametrize("name", NAMES)
def test_every_method_reads_a_key_that_exists(name: str) -> None:
    getattr(Asked(), name)()  # a path that leads nowhere would raise
    assert getattr(ConfigAccess, name).__doc__


@pytest.mark.parametrize(
    ("name", "keys", "answer"),
    [
        ("gradient_clipping", {"gradient_clipping": 0.5}, 0.5),
        ("postscale_gradients", {"prescale_gradients": True}, False),
        ("optimizer_name", {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, "adamw"),
        ("optimizer_name", {}, None),
        ("scheduler_name", {"scheduler": {"type": "WarmupLR", "params": {}}}, "WarmupLR"),
        ("dynamic_loss_scale", {"fp16": {"enabled": True, "loss_scale": 8}}, False),
        ("initial_dynamic_scale", {"fp16": {"enabled": True, "initial_scale_power": 4}}, 16.0),
        ("zero_optimization", {}, False),
        ("zero_reduce_bucket_size", {"zero_optimization": {"reduce_bucket_size": 1000}}, 1000),
        ("zero_use_cpu_optimizer", {}, False),
        ("zero_partial_offload", {}, 1.0),
        ("checkpoint_tag_validation_fail", {"checkpoint": {"tag_validation": "Fail"}}, True),
        ("checkpoint_tag_validation_enabled", {"checkpoint": {"tag_validation": "Ignore"}}, False),
    ],
)
def test_answers_follow_the_config(name: str, keys: dict[str, Any], answer: Any) -> None:
    assert getattr(Asked(**keys), name)() == answer
