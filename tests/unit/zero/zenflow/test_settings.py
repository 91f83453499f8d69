"""The block in steps."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed.config.zero import ZenFlowConfig
from deepspeed.errors import ArgumentError
from deepspeed.zero.zenflow.schedule import Window
from deepspeed.zero.zenflow.settings import AUTO_CHOICE_STEPS, ZenFlowSettings


def window(loader_steps: int | None = None, **keys: Any) -> Window:
    return ZenFlowSettings.of(ZenFlowConfig.model_validate(keys), loader_steps).window


def test_auto_chooses_every_epoch_where_somebody_knows_how_long_one_is() -> None:
    assert window() == Window(0, None, AUTO_CHOICE_STEPS, is_behind=False)
    assert window(7).choice_every == 7
    assert window(7, steps_per_epoch=9).choice_every == 9


def test_numbers_are_updates_or_epochs() -> None:
    made = window(select_strategy="step", select_interval=6, update_interval=3, full_warm_up_rounds=2, overlap_step=True)
    assert made == Window(2, 3, 6, is_behind=True)
    assert window(5, select_strategy="epoch", select_interval=2).choice_every == 10


def test_an_epoch_of_unknown_length_is_refused_with_its_cure() -> None:
    with pytest.raises(ArgumentError, match=r"steps_per_epoch .*, or use select_strategy"):
        window(select_strategy="epoch", select_interval=2)


def test_other_keys_are_taken_as_they_are() -> None:
    block = ZenFlowConfig.model_validate(
        {"topk_ratio": 0.2, "auto_ratio": 0.5, "offload": True, "pt_reserved_cores_perc": 0.25}
    )
    made = ZenFlowSettings.of(block)
    assert (made.topk_ratio, made.auto_ratio, made.keeps_state_on_host, made.reserved_share) == (0.2, 0.5, True, 0.25)
