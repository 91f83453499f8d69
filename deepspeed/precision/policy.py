"""Which format each kind of tensor of a run has, and putting a module into it.

    config -> Formats -> DtypePolicy -> cast_module(module)            parameters and buffers, in place
                               |-> param_for(p), master_for(p), grad_accumulation_for(dtype), communication_for(dtype)

Without `fp16` or `bf16` every parameter keeps the format it came with: a float64 model trains in float64.

Not here: what the configuration asks for (`formats`), whether a device has a format (`accelerator`), scaling
(`loss_scaler`), autocast itself (the engine).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ConfigError
from deepspeed.precision.formats import Formats, PrecisionConfig

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_NO_CAST = "_deepspeed_no_cast"


@dataclass(frozen=True)
class DtypePolicy:
    """The formats of a run. None stands for "as the parameter": see each field."""

    param: torch.dtype | None = None
    """Parameters are cast to this; None leaves each as it is."""
    master: torch.dtype | None = None
    """The copy that the optimizer steps; None steps the parameter itself."""
    state: torch.dtype | None = None
    """What the optimizer of 16-bit masters computes in and keeps its state in; None is as the masters."""
    grad_accumulation: torch.dtype | None = None
    """Gradients are added up in this over micro-batches; None takes the parameter's."""
    communication: torch.dtype | None = None
    """Gradients travel in this; None is float32, or the gradient's own where that is wider."""
    buffer: torch.dtype | None = None
    """Floating buffers are cast to this; None leaves each as it is."""
    keep_in_fp32: tuple[str, ...] | Literal["auto"] = "auto"
    """Patterns of buffers that are float32 while parameters are 16-bit; "auto" asks the model."""
    autocast: torch.dtype | None = None
    """Forward's autocast regions compute in this; None is no autocast."""

    @classmethod
    def from_config(
        cls, config: PrecisionConfig, device_type: str | None = None, *, shares_sequences: bool = False
    ) -> DtypePolicy:
        """Read the policy from the config.

        Args:
            config: of the engine.
            device_type: where forward runs; None: the accelerator's.
            shares_sequences: whether several ranks share a sequence: `seq_parallel_communication_data_type` counts then.

        Raises:
            ConfigError: `data_types.param_dtype` contradicts `fp16` and `bf16`.
        """
        formats = Formats.of(config, shares_sequences=shares_sequences)
        keep = config.data_types.keep_in_fp32_modules
        return cls(
            param=_dtype(formats.param),
            master=_dtype(formats.master),
            state=_dtype(formats.state),
            grad_accumulation=_dtype(formats.grad_accumulation),
            communication=_dtype(formats.communication),
            buffer=_dtype(formats.buffer),
            keep_in_fp32="auto" if keep == "auto" else tuple(keep),
            autocast=autocast_dtype(config, device_type),
        )

    def param_for(self, param: Tensor) -> torch.dtype:
        """Format that `param` has after `cast_module`."""
        is_cast = self.param is not None and param.is_floating_point() and not getattr(param, _NO_CAST, False)
        return self.param if is_cast and self.param is not None else param.dtype

    def master_for(self, param: Tensor) -> torch.dtype:
        """Format of the copy of `param` that the optimizer steps; never narrower than the parameter after the cast."""
        dtype = self.param_for(param)
        return dtype if self.master is None else torch.promote_types(self.master, dtype)

    def grad_accumulation_for(self, dtype: torch.dtype) -> torch.dtype:
        """Format in which gradients of a parameter of `dtype` are added up."""
        return self.grad_accumulation or dtype

    def communication_for(self, dtype: torch.dtype) -> torch.dtype:
        """Format in which gradients of `dtype` travel between ranks."""
        return self.communication or torch.promote_types(dtype, torch.float32)


def autocast_dtype(config: PrecisionConfig, device_type: str | None = None) -> torch.dtype | None:
    """Format of forward's autocast regions: the named one, else torch's default for the device; None without autocast."""
    block = config.torch_autocast
    if not block.enabled:
        return None
    if block.dtype is not None:
        return DTYPES[block.dtype]
    return torch.get_autocast_dtype(device_type or get_accelerator().device_name())


def keep_batch_norm_exact(module: nn.Module) -> None:
    """Mark the parameters of batch normalisation so that they are not cast to 16 bits.

    Running statistics are moving averages that 16 bits would stop short, so they keep their format; torch's kernels take
    16-bit inputs with fp32 statistics only together with fp32 weights. A layer that came in 16 bits stays as it came.
    """
    for layer in module.modules():
        if isinstance(layer, _NormBase):
            for p in layer.parameters(recurse=False):
                setattr(p, _NO_CAST, True)


@contextmanager
def exact_batch_norm(module: nn.Module) -> Iterator[None]:
    """The same inside only, for whoever looks at a model without an engine."""
    params = [p for layer in module.modules() if isinstance(layer, _NormBase) for p in layer.parameters(recurse=False)]
    marked = [p for p in params if not hasattr(p, _NO_CAST)]
    keep_batch_norm_exact(module)
    try:
        yield
    finally:
        for p in marked:
            delattr(p, _NO_CAST)


def low_precision_parameters(module: nn.Module, class_names: Iterable[str]) -> set[int]:
    """Identities of the parameters of layers of the named classes (`torch_autocast.lower_precision_safe_modules`).

    Raises:
        ConfigError: a name does not lead to a module class.
    """
    classes = tuple(_class_named(name) for name in class_names)
    return {id(p) for layer in module.modules() if isinstance(layer, classes) for p in layer.parameters(recurse=False)}


def _class_named(name: str) -> type[nn.Module]:
    package, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(package), attribute) if package else None
    except (ImportError, AttributeError):
        found = None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(
            f'torch_autocast.lower_precision_safe_modules names "{name}", which is no torch.nn.Module class. Write the full '
            'import path, for example "torch.nn.Linear".'
        )
    return found


def cast_module(module: nn.Module, policy: DtypePolicy) -> None:
    """Put `module` into the formats of `policy`, in place.

    Every Parameter and buffer object stays the same one, so ties, optimizers and references hold. Left alone are
    parameters marked with `_deepspeed_no_cast = True`, and tensors that are not floating point.
    """
    if policy.param is not None:
        for p in module.parameters():
            _cast(p, policy.param_for(p))
    kept = _kept_in_fp32(module, policy)
    for name, buffer in module.named_buffers():
        target = torch.float32 if any(_matches(name, pattern) for pattern in kept) else policy.buffer
        if target is not None:
            _cast(buffer, target)


def _cast(tensor: Tensor, dtype: torch.dtype) -> None:
    """Change the format of `tensor`, and of its gradient, without making another object of it."""
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return
    gradient, tensor.grad = tensor.grad, None
    tensor.data = tensor.data.to(dtype)
    if gradient is not None:
        tensor.grad = gradient.to(dtype)


def _kept_in_fp32(module: nn.Module, policy: DtypePolicy) -> list[str]:
    """Patterns of buffers that stay float32; none unless parameters are 16-bit."""
    if policy.param is None:
        return []
    if policy.keep_in_fp32 != "auto":
        return list(policy.keep_in_fp32)
    sources = ["_keep_in_fp32_modules_strict"]
    if policy.param == torch.float16:
        sources.append("_keep_in_fp32_modules")
    found: list[str] = []
    for source in sources:
        patterns: Iterable[str] | None = getattr(module, source, None)
        found += patterns or ()
    return found


def _matches(name: str, pattern: str) -> bool:
    """Whether `pattern` fits the whole dotted name of a buffer, the name of a module around it, or one part of those."""
    parts = name.split(".")
    around = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatchcase(candidate, pattern) for candidate in (*parts, *around))


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]
