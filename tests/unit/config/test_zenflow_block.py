"""What the `zenflow` block, `ratio` and `super_offload` need beside them."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ConfigError

CPU = {"device": "cpu"}


def read(zero: dict[str, Any], **blocks: Any) -> DeepSpeedConfig:
    return DeepSpeedConfig({"train_batch_size": 4, "zero_optimization": zero, "gradient_clipping": 0.0, **blocks})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zenflow_goes_with_an_optimizer_on_the_cpu(stage: int) -> None:
    block = read({"stage": stage, "offload_optimizer": CPU, "zenflow": {}}).zero_optimization.zenflow
    assert block is not None
    assert (block.topk_ratio, block.update_interval, block.overlap_step) == (0.1, "auto", False)


@pytest.mark.parametrize(
    ("zero", "blocks", "key", "needed"),
    [
        ({}, {}, "zero_optimization.zenflow", 'offload_optimizer.device "cpu"'),
        ({"offload_optimizer": {"device": "none"}}, {}, "zero_optimization.zenflow", 'offload_optimizer.device "cpu"'),
        (
            {"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}},
            {},
            "zero_optimization.zenflow",
            'offload_optimizer.device "cpu"',
        ),
        ({"stage": 3, "offload_optimizer": {**CPU, "ratio": 0.5}}, {}, "zero_optimization.zenflow", "ratio 1.0"),
        ({"offload_optimizer": {**CPU, "super_offload": True}}, {}, "zero_optimization.zenflow", "super_offload false"),
        ({"offload_optimizer": CPU, "compute_grad_norm": False}, {}, "zero_optimization.compute_grad_norm", "with zenflow"),
        ({"offload_optimizer": CPU}, {"gradient_allreduce_op": "sum"}, "gradient_allreduce_op", '"mean"'),
        (
            {"offload_optimizer": CPU},
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "bf16.bf16_master_weights_and_grads",
            "false with zero_optimization.zenflow",
        ),
    ],
)
def test_what_does_not_go_with_zenflow_is_refused(zero: dict[str, Any], blocks: Any, key: str, needed: str) -> None:
    with pytest.raises(ConfigError) as error:
        read({"stage": 2, "zenflow": {}, **zero}, **blocks)
    assert any(f"{key} = " in line and needed in line for line in str(error.value).splitlines()), str(error.value)


@pytest.mark.parametrize("keys", [{"ratio": 0.5}, {"super_offload": True}])
def test_what_steps_in_memory_does_not_go_with_files(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match='needed device "cpu"'):
        read({"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x", **keys}})


def test_at_stage_0_the_block_is_idle() -> None:
    assert read({"stage": 0, "zenflow": {}}).zero_optimization.zenflow is not None
