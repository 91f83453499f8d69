"""A loss without the loss scale is noticed."""

from __future__ import annotations

import pytest
import torch

from deepspeed.engine.loss_guard import LossGuard
from deepspeed.errors import UsageError
from deepspeed.precision.loss_scaler import NullScaler, StaticLossScaler


def test_a_backward_before_any_scaled_loss_is_refused_with_the_cure() -> None:
    guard = LossGuard(StaticLossScaler(8.0))
    with pytest.raises(UsageError, match=r"engine\.backward\(loss\)"):
        guard.check()


def test_a_scaled_loss_opens_the_window_until_the_step_ends() -> None:
    guard = LossGuard(StaticLossScaler(8.0))
    assert guard.scale(torch.tensor(2.0), 0.5).item() == 8.0
    guard.check()
    guard.check()
    guard.reset()
    with pytest.raises(UsageError):
        guard.check()


def test_a_16_bit_loss_is_scaled_in_fp32_so_that_it_cannot_overflow() -> None:
    scaled = LossGuard(StaticLossScaler(65536.0)).scale(torch.tensor(4.0, dtype=torch.float16))
    assert scaled.dtype == torch.float32
    assert scaled.item() == 4.0 * 65536


def test_without_a_scale_the_very_loss_comes_back() -> None:
    loss = torch.tensor(2.0)
    assert LossGuard(NullScaler()).scale(loss) is loss
