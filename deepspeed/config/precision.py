"""Blocks about number formats: `fp16`, `bf16`, `torch_autocast`, `data_types`, and the old `amp`.

Lives here: keys, ranges, and what keys of one block forbid each other. Does not live here: what a format implies for ZeRO
(`config.root`), casting and scaling (`precision`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from deepspeed.config.base import ConfigModel
from deepspeed.config.faults import Refusal
from deepspeed.config.values import Dtype, DtypeOrInt8, NonNegativeNumber, Number, TextList, Whole

__all__ = ["AmpConfig", "BF16Config", "DataTypesConfig", "FP16Config", "TorchAutocastConfig"]


class FP16Config(ConfigModel):
    """`fp16`: 16-bit floats with an fp32 master copy and a loss scale."""

    enabled: bool = False
    """Keep the model in fp16. Excludes `bf16.enabled`."""

    auto_cast: bool = False
    """Cast floating inputs of forward to fp16."""

    loss_scale: NonNegativeNumber = 0.0
    """A fixed loss scale; 0 means a dynamic one."""

    initial_scale_power: Annotated[Whole, Field(ge=0, le=126)] = 16
    """A dynamic scale starts at 2 to this power."""

    loss_scale_window: Whole = 1000
    """Steps without overflow after which a dynamic scale doubles; > 0."""

    hysteresis: Whole = 2
    """Overflows after which a dynamic scale is halved; >= 1, where 1 halves it at once."""

    consecutive_hysteresis: bool = False
    """Each good step forgets earlier overflows, so that only consecutive ones count."""

    min_loss_scale: Number = 1.0
    """A dynamic scale does not fall below this; > 0."""

    fp16_master_weights_and_grads: bool = False
    """The optimizer steps the fp16 weights themselves, from fp16 gradients; no fp32 copy. Its state stays fp32, and each
    step is computed in fp32 and rounded once. ZeRO stages 1-3."""

    def check(self) -> Iterable[Refusal]:
        """A dynamic scale needs a window, a hysteresis and a floor that make sense; disabled or fixed, none is read."""
        if not self.enabled or self.loss_scale > 0:
            return
        if self.loss_scale_window < 1:
            yield Refusal("loss_scale_window", "needed a whole number > 0", "The default is 1000.")
        if self.hysteresis < 1:
            yield Refusal(
                "hysteresis", "needed a whole number >= 1", "1 halves the scale at the first overflow; the default is 2."
            )
        if self.min_loss_scale <= 0:
            yield Refusal("min_loss_scale", "needed a number > 0", "The default is 1.")
        elif self.min_loss_scale > 2.0**self.initial_scale_power:
            start = f"2 ** initial_scale_power = {2.0**self.initial_scale_power:g}"
            yield Refusal(
                "min_loss_scale", f"needed at most the first scale, {start}", "Lower it, or raise initial_scale_power."
            )


class BF16Config(ConfigModel):
    """`bf16` (also spelled `bfloat16`): 16-bit brain floats with an fp32 master copy; no loss scale."""

    spellings: ClassVar[Mapping[str, str]] = {"check_overflow": "check_grad_overflow"}

    enabled: bool = False
    """Keep the model in bf16. Excludes `fp16.enabled`."""

    immediate_grad_update: bool = True
    """Add each gradient to its accumulation buffer as soon as it is there. This engine always does; kept for old files."""

    check_grad_overflow: bool = True
    """Skip a step, on all ranks together, when any gradient is infinite or NaN."""

    bf16_master_weights_and_grads: bool = False
    """The optimizer steps the bf16 weights themselves, from bf16 gradients; no fp32 copy. Its state stays fp32, and each
    step is computed in fp32 and rounded once. ZeRO stages 1-3."""

    bf16_optimizer_states: bool = False
    """Keep the optimizer's moments in bf16. Optimizers of this library compute in fp32 and round once per step; those of
    torch compute as they do on a bf16 model. ZeRO stages 1-3, with `bf16_master_weights_and_grads`."""

    def check(self) -> Iterable[Refusal]:
        """States in bf16 rest on masters in bf16."""
        if self.enabled and self.bf16_optimizer_states and not self.bf16_master_weights_and_grads:
            yield Refusal(
                "bf16_optimizer_states",
                "needed bf16_master_weights_and_grads = true with it",
                "Set both, or leave bf16_optimizer_states out.",
            )


class TorchAutocastConfig(ConfigModel):
    """`torch_autocast`: run forward under `torch.autocast`; parameters keep their own format."""

    enabled: bool = False
    """Wrap forward in `torch.autocast`, in place of an outer one."""

    dtype: DtypeOrInt8 | None = None
    """Format of the autocast regions: fp16 or bf16, also as `float16`, `half`, `bfloat16`, `torch.bfloat16`. Left out:
    torch's default for the device."""

    lower_precision_safe_modules: TextList | None = None
    """Classes, as `package.Class` (`torch.nn.Linear`), of which gradients travel in `dtype`: half the bytes, one more
    rounding. Left out: none."""

    def check(self) -> Iterable[Refusal]:
        """torch.autocast knows two formats."""
        if self.enabled and self.dtype in ("fp32", "int8"):
            yield Refusal("dtype", "needed fp16 or bf16", "For full precision set torch_autocast.enabled to false.")


class DataTypesConfig(ConfigModel):
    """`data_types`: formats of gradients, parameters and buffers where they differ from the model's."""

    grad_accum_dtype: Dtype | None = None
    """Format in which gradients are added up over micro-batches: fp16, bf16 or fp32. Left out: the model's."""

    param_dtype: Dtype | None = None
    """States the parameters' format; must agree with `fp16`/`bf16` (fp32 when neither is enabled)."""

    buffer_dtype: Dtype | None = None
    """Cast buffers to this format. Left out: buffers stay as they are."""

    keep_in_fp32_modules: Literal["auto"] | list[str] = "auto"
    """Buffers that stay fp32 under fp16 and bf16, as name patterns. "auto" asks the model
    (`_keep_in_fp32_modules_strict`); an empty list means none."""


class AmpConfig(ConfigModel):
    """`amp`: NVIDIA Apex mixed precision; every further key is an argument of `apex.amp.initialize`."""

    model_config = ConfigDict(extra="allow")

    enabled: bool = False
    """Use Apex. Write a `bf16`, `fp16` or `torch_autocast` block instead."""
