"""The original's optimizer files name our loss scalers, enums and records by their published paths."""

from __future__ import annotations

from pathlib import Path

import torch

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

FIXTURES = Path(__file__).parents[2] / "fixtures" / "original"


def test_an_optimizer_file_of_the_original_opens_with_its_classes() -> None:
    path = FIXTURES / "stage1-fp32" / "step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    state = torch.load(path, weights_only=False)["optimizer_state_dict"]
    assert state["zero_stage"] is ZeroStageEnum.optimizer_states
    assert type(state["loss_scaler"]) is LossScaler
    assert state["loss_scaler"].cur_scale == 1.0
    first = next(iter(state["param_slice_mappings"][0].values()))
    assert isinstance(first, fragment_address)
    assert (first.numel, first.start) == (204, 0)


def test_a_moving_scale_of_the_original_goes_on() -> None:
    scaler = DynamicLossScaler.__new__(DynamicLossScaler)
    fields = {"cur_scale": 64.0, "cur_iter": 8, "last_overflow_iter": 3, "scale_window": 4, "cur_hysteresis": 1}
    scaler.__setstate__({**fields, "delayed_shift": 2, "min_scale": 2, "dynamic": True})
    assert (scaler.scale, scaler.rules.min_scale, scaler.rules.hysteresis) == (64.0, 2, 2)
    scaler.update(overflow=False)  # the window of four ends here
    assert scaler.scale == 128.0
