"""Under fp16 a loss must carry the loss scale: this notices a plain `loss.backward()` in a window where none was scaled.

Does not live here: how the scale moves (`precision.loss_scaler`). The engine scales through it; `zero.reducer` asks it when
a backward begins.
"""

from __future__ import annotations

from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.precision.loss_scaler import LossScaler, NullScaler

_FP32_BYTES = 4


class LossGuard:
    """Puts the loss scale on losses and remembers that it did, until the step ends.

    One scaled loss opens the window: nested (reentrant) backward passes begin several times for one loss, so beginnings
    cannot be counted against losses.
    """

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler
        self._is_open = False

    @property
    def loss_scale(self) -> float | None:
        """The scale, None where there is none to speak of."""
        return None if isinstance(self.scaler, NullScaler) else self.scaler.scale

    def scale(self, loss: Tensor, factor: float = 1.0) -> Tensor:
        """`loss` x loss scale x `factor`, in fp32 where the loss is 16-bit and is changed at all."""
        self._is_open = True
        total = factor * self.scaler.scale
        if total == 1.0:
            return loss
        return (loss.float() if loss.dtype.itemsize < _FP32_BYTES else loss) * total

    def open(self) -> None:
        """The loss of this window is scaled elsewhere: by another stage of a pipeline."""
        self._is_open = True

    def check(self) -> None:
        """A backward begins.

        Raises:
            UsageError: no loss was scaled since the last step.
        """
        if not self._is_open:
            raise UsageError(
                f"loss.backward() was called on a loss without the loss scale ({self.scaler.scale:g}) that fp16 needs. "
                "Call engine.backward(loss), or engine.scale(loss).backward(). (One loss through several "
                "fp16 engines would need one scale for all: use bf16 there.)"
            )

    def reset(self) -> None:
        """A step ended: the next backward needs a scaled loss again."""
        self._is_open = False
