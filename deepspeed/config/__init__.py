"""The configuration: every key as a typed, checked field; a faulty configuration is refused with all its faults.

`DeepSpeedConfig` in `config.root` is the whole; each JSON block is a model in the module named for its idea. Knows no torch
and no processes. Names load at first use, so that a program pays for the blocks it uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.common.lazy import attach

if TYPE_CHECKING:
    from deepspeed.config.arguments import add_config_arguments, config_from_args
    from deepspeed.config.batch import BatchSizes, resolve_batch
    from deepspeed.config.load import load_config, strip_auto
    from deepspeed.config.root import DeepSpeedConfig

__all__ = [
    "BatchSizes",
    "DeepSpeedConfig",
    "add_config_arguments",
    "config_from_args",
    "load_config",
    "resolve_batch",
    "strip_auto",
]

__getattr__, __dir__ = attach(
    __name__,
    names={
        "BatchSizes": "deepspeed.config.batch:BatchSizes",
        "DeepSpeedConfig": "deepspeed.config.root:DeepSpeedConfig",
        "add_config_arguments": "deepspeed.config.arguments:add_config_arguments",
        "config_from_args": "deepspeed.config.arguments:config_from_args",
        "load_config": "deepspeed.config.load:load_config",
        "resolve_batch": "deepspeed.config.batch:resolve_batch",
        "strip_auto": "deepspeed.config.load:strip_auto",
    },
)
