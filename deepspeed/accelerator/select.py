"""Which accelerator this process uses: DS_ACCELERATOR when it is set, else the first one found.

Lives here: the current accelerator, behind get and set, and the only reading of DS_ACCELERATOR. Probing imports no
plug-in whose package is absent and initialises no device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

from deepspeed.accelerator.cpu import CpuAccelerator
from deepspeed.accelerator.cuda import CudaAccelerator
from deepspeed.accelerator.interface import DeepSpeedAccelerator
from deepspeed.accelerator.mps import MpsAccelerator
from deepspeed.accelerator.others import OTHERS, OtherAccelerator
from deepspeed.common.logging import get_logger
from deepspeed.errors import AcceleratorError, ArgumentError

__all__ = [
    "SUPPORTED_ACCELERATORS",
    "choose",
    "get_accelerator",
    "is_current_accelerator_supported",
    "set_accelerator",
]

logger = get_logger(__name__)

_PROBE_ORDER = ("xpu", "npu", "sdaa", "mps", "hpu", "mlu", "cuda")  # the CPU is always there, so it comes last
SUPPORTED_ACCELERATORS = (*_PROBE_ORDER, "cpu")

_current: DeepSpeedAccelerator | None = None


def _build(name: str, environ: Mapping[str, str]) -> DeepSpeedAccelerator:
    if name in OTHERS:
        return OtherAccelerator(name)
    return {"cpu": lambda: CpuAccelerator(environ), "cuda": CudaAccelerator, "mps": MpsAccelerator}[name]()


Builder = Callable[[str, Mapping[str, str]], DeepSpeedAccelerator]


def choose(environ: Mapping[str, str], build: Builder = _build) -> DeepSpeedAccelerator:
    """Return the accelerator that an environment asks for, or the first one available.

    Args:
        environ: where DS_ACCELERATOR (a name of `SUPPORTED_ACCELERATORS`, any case) is read; unset or empty means probe.
        build: makes an accelerator from its name.

    Raises:
        AcceleratorError: DS_ACCELERATOR is unknown, or names a device that this process cannot use.
    """
    wanted = environ.get("DS_ACCELERATOR", "").strip().lower()
    if not wanted:
        candidates = (build(name, environ) for name in SUPPORTED_ACCELERATORS)
        return next(candidate for candidate in candidates if candidate.is_available())
    if wanted not in SUPPORTED_ACCELERATORS:
        raise AcceleratorError(
            f"DS_ACCELERATOR={wanted!r} is unknown; it must be one of {', '.join(SUPPORTED_ACCELERATORS)}. "
            "Unset it to use the first device found."
        )
    accelerator = build(wanted, environ)
    if not accelerator.is_available():
        plugin = OTHERS[wanted].plugin if wanted in OTHERS else None
        needs = (
            f"the package {plugin!r} and its driver" if plugin else f"a build of torch with {wanted} support and its driver"
        )
        raise AcceleratorError(
            f"DS_ACCELERATOR={wanted}, but torch {torch.__version__} finds no {wanted} device here. It needs {needs}. "
            "Install them, or unset DS_ACCELERATOR to use the first device found (the CPU at worst)."
        )
    return accelerator


def get_accelerator() -> DeepSpeedAccelerator:
    """Return this process's accelerator; the first call chooses it. Errors as `choose`."""
    global _current
    if _current is None:
        _current = choose(os.environ)
        logger.debug("the accelerator is %s", _current.device_name())
    return _current


def set_accelerator(accelerator: DeepSpeedAccelerator | None) -> None:
    """Make `accelerator` this process's accelerator; None lets the next `get_accelerator` choose again.

    Raises:
        ArgumentError: it is not a `DeepSpeedAccelerator`.
    """
    global _current
    if accelerator is not None and not isinstance(accelerator, DeepSpeedAccelerator):
        raise ArgumentError(
            f"set_accelerator got a {type(accelerator).__name__}; it needs an instance of a DeepSpeedAccelerator subclass."
        )
    _current = accelerator


def is_current_accelerator_supported() -> bool:
    """True when the current accelerator is one that this library knows, rather than one set from outside."""
    return get_accelerator().device_name() in SUPPORTED_ACCELERATORS
