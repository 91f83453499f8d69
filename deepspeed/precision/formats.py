"""Which formats a configuration asks for, by name: what can be said of a run before there is a tensor. Pure: no torch.

    config -> Formats -> DtypePolicy (`policy`), which also looks at each parameter

Without `fp16` or `bf16` nothing is asked for, and every parameter keeps the format it came with.

Called by `policy`, and by `planning.formula`, which has no parameters to look at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from deepspeed.config.precision import BF16Config, DataTypesConfig, FP16Config, TorchAutocastConfig
from deepspeed.errors import ConfigError

__all__ = ["NBYTES", "Format", "Formats", "PrecisionConfig"]

Format = Literal["fp16", "bf16", "fp32"]
NBYTES: Mapping[Format, int] = {"fp16": 2, "bf16": 2, "fp32": 4}
"""Of one element."""


class PrecisionConfig(Protocol):
    """The part of the config that this room reads."""

    @property
    def fp16(self) -> FP16Config:
        """The block `fp16`."""

    @property
    def bf16(self) -> BF16Config:
        """The block `bf16`."""

    @property
    def torch_autocast(self) -> TorchAutocastConfig:
        """The block `torch_autocast`."""

    @property
    def data_types(self) -> DataTypesConfig:
        """The block `data_types`."""

    @property
    def communication_data_type(self) -> Format | None:
        """The key of that name."""

    @property
    def seq_parallel_communication_data_type(self) -> Format | None:
        """Likewise."""


@dataclass(frozen=True)
class Formats:
    """What is asked for. None stands for "as the parameter": each field is explained where it is one of `DtypePolicy`."""

    param: Format | None = None
    master: Format | None = None
    state: Format | None = None
    grad_accumulation: Format | None = None
    communication: Format | None = None
    buffer: Format | None = None

    @classmethod
    def of(cls, config: PrecisionConfig, *, shares_sequences: bool = False) -> Formats:
        """Read them from the config.

        Args:
            config: of the engine.
            shares_sequences: whether several ranks share a sequence: `seq_parallel_communication_data_type` counts then.

        Raises:
            ConfigError: `data_types.param_dtype` contradicts `fp16` and `bf16`.
        """
        mode: Format = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"
        types = config.data_types
        if types.param_dtype not in (None, mode):
            raise ConfigError(
                f'data_types.param_dtype = "{types.param_dtype}", but fp16.enabled and bf16.enabled make parameters {mode}. '
                "Change one of them, or leave param_dtype out."
            )
        is_16_bit = mode != "fp32"
        has_16_bit_master = (mode == "fp16" and config.fp16.fp16_master_weights_and_grads) or (
            mode == "bf16" and config.bf16.bf16_master_weights_and_grads
        )
        has_16_bit_state = mode == "bf16" and config.bf16.bf16_optimizer_states
        communication = config.communication_data_type
        if shares_sequences:
            communication = config.seq_parallel_communication_data_type
        is_wide = shares_sequences and communication == "fp32"  # fp64 gradients stay as wide as they are
        return cls(
            param=mode if is_16_bit else None,
            master=(mode if has_16_bit_master else "fp32") if is_16_bit else None,
            state=(mode if has_16_bit_state else "fp32") if has_16_bit_master else None,
            grad_accumulation=types.grad_accum_dtype,
            communication=None if is_wide else communication or (mode if is_16_bit else None),
            buffer=types.buffer_dtype,
        )
