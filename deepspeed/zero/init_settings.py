"""What `zero.Init` takes from its arguments and from a config that may not be complete yet.

    config (dict, path, base64) --load, drop "auto"--> blocks zero_optimization, fp16, bf16, aio --+
    arguments of zero.Init, which win --------------------------------------------------------------+--> InitSettings

Lives here: reading these four blocks alone, because clients hand the config over before they know batch sizes and while
values are still "auto". Does not live here: the whole config (`config.root`), which `initialize` reads. Called by
`zero.init_context`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from deepspeed.config.base import ConfigModel, faults_of, parse
from deepspeed.config.faults import Fault, raise_faults
from deepspeed.config.load import load_config, strip_auto
from deepspeed.config.memory import AioConfig
from deepspeed.config.precision import BF16Config, FP16Config
from deepspeed.config.zero import OffloadParamConfig, ZeroConfig
from deepspeed.errors import ArgumentError
from deepspeed.ops.aio.settings import IoSettings

__all__ = ["InitSettings", "read_settings"]

_Block = TypeVar("_Block", bound=ConfigModel)


@dataclass(frozen=True)
class InitSettings:
    """What a `zero.Init` context does with the parameters made in it."""

    dtype: torch.dtype
    """Of floating tensors that are made without naming a dtype."""
    is_remote: bool
    """Shards rest in host memory, or in a file."""
    pin_memory: bool
    """... page-locked."""
    nvme_path: Path | None
    """Where the file is; None: there is none."""
    max_in_cpu: int
    """Elements that stay in host memory where there is a file."""
    io: IoSettings
    """How the file is read and written."""
    override_module_apply: bool
    """`Module.apply` opens parameters around its function."""
    max_live_numel: int
    """Elements that may be whole at a time because they were looked up."""


def read_settings(
    config: Any = None,
    *,
    dtype: torch.dtype | None = None,
    remote_device: str | None = None,
    pin_memory: bool = False,
) -> InitSettings:
    """Read the settings.

    Args:
        config: dict, path or base64 of a DeepSpeed config, or a `DeepSpeedConfig`; only the blocks `zero_optimization`,
            `fp16`, `bf16` and `aio` are read, and "auto" means the default.
        dtype: wins over the config; without both it is fp32, or torch's default dtype where that is wider.
        remote_device: "cpu", "nvme" or "none"; None asks `offload_param.device` of the config. "nvme" needs its `nvme_path`.
        pin_memory: page-lock shards in host memory; `offload_param.pin_memory` does so as well.

    Raises:
        ConfigError: a block has faults; all of them are listed.
        ArgumentError: another `remote_device`, or "nvme" without a path.
    """
    raw = _raw(config)
    faults: list[Fault] = []
    zero = _block(ZeroConfig, raw, ("zero_optimization",), faults)
    fp16 = _block(FP16Config, raw, ("fp16",), faults)
    bf16 = _block(BF16Config, raw, ("bf16", "bfloat16"), faults)
    aio = _block(AioConfig, raw, ("aio",), faults)
    if faults:
        raise_faults(faults, "given to zero.Init")
    if fp16.enabled and bf16.enabled:
        raise ArgumentError("zero.Init: fp16.enabled and bf16.enabled are both true; needed one at most. Drop one of them.")
    configured = torch.float16 if fp16.enabled else torch.bfloat16 if bf16.enabled else _full_precision()
    offload = zero.offload_param
    place = str(getattr(remote_device, "value", remote_device) or (offload.device if offload is not None else "none"))
    return InitSettings(
        dtype=dtype or configured,
        is_remote=_is_remote(place),
        nvme_path=_nvme_path(offload) if place == "nvme" else None,
        max_in_cpu=0 if offload is None else offload.max_in_cpu,
        io=IoSettings.of(aio),
        pin_memory=pin_memory or (offload is not None and offload.pin_memory),
        override_module_apply=zero.override_module_apply,
        max_live_numel=zero.max_live_parameters,
    )


def _raw(config: Any) -> Mapping[str, Any]:
    given = getattr(config, "raw", config)
    return strip_auto(load_config(given)) if given is not None else {}


def _block(model: type[_Block], raw: Mapping[str, Any], names: tuple[str, ...], faults: list[Fault]) -> _Block:
    name = next((name for name in names if name in raw), names[0])
    given = raw.get(name)
    block, wrong = parse(model.model_validate, {} if given is None else given)
    faults += faults_of(wrong, name)
    return block if block is not None else model()


def _full_precision() -> torch.dtype:
    return torch.promote_types(torch.float32, torch.get_default_dtype())


def _is_remote(place: str) -> bool:
    if place not in ("none", "cpu", "nvme"):
        raise ArgumentError(
            f'zero.Init(remote_device="{place}"): needed None, "cpu" or "nvme": "cpu" keeps shards in host memory, "nvme" '
            "in a file in offload_param.nvme_path."
        )
    return place != "none"


def _nvme_path(offload: OffloadParamConfig | None) -> Path:
    if offload is None or offload.nvme_path is None:
        raise ArgumentError(
            'zero.Init(remote_device="nvme") without a place: the config has no zero_optimization.offload_param.nvme_path. '
            'Give it one, for example {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": '
            '"/local_nvme"}}}.'
        )
    return Path(offload.nvme_path)
