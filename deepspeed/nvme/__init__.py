"""Measuring disks: `ds_io` times one way of reading or writing, `ds_nvme_tune` finds the best `aio` block."""

from __future__ import annotations

from deepspeed.common.lazy import attach

__all__ = ["ds_io_main", "ds_nvme_tune_main"]

__getattr__, __dir__ = attach(
    __name__,
    submodules=("io_command", "tune_command"),
    names={
        "ds_io_main": "deepspeed.nvme.io_command:main",
        "ds_nvme_tune_main": "deepspeed.nvme.tune_command:main",
    },
)
