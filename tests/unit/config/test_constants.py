from __future__ import annotations

from deepspeed.config.constants import key_constants


def test_each_key_is_a_constant_with_its_default() -> None:
    constants = key_constants()
    assert constants["TRAIN_BATCH_SIZE"] == "train_batch_size"
    assert constants["GRADIENT_ACCUMULATION_STEPS"] == "gradient_accumulation_steps"
    assert constants["GRADIENT_CLIPPING_DEFAULT"] == 0.0
    assert constants["WALL_CLOCK_BREAKDOWN_DEFAULT"] is False
    assert "ZERO_OPTIMIZATION" in constants
