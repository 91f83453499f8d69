"""How many devices this machine has and which variable hides some of them, found without importing torch where possible.

Importing torch costs seconds, which every start of a job would pay. The kernel's device files tell at once that a machine
has no accelerator; only where there may be one, and the user did not say how many ranks to start, torch is asked.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from deepspeed.launcher.hostfile import Slot

__all__ = [
    "VISIBLE_DEVICES",
    "count_devices",
    "devices_from_slurm",
    "hides_all",
    "likely_accelerator",
    "parse_visible_devices",
    "visible_devices_name",
]

VISIBLE_DEVICES = {
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "sdaa": "SDAA_VISIBLE_DEVICES",
    "hpu": "HABANA_VISIBLE_MODULES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "cuda": "CUDA_VISIBLE_DEVICES",
    "mps": "CUDA_VISIBLE_DEVICES",
    "cpu": "CUDA_VISIBLE_DEVICES",
}
"""The variable of each accelerator; for those without one, CUDA's, which changes nothing there."""

_DEVICE_FILES = {
    "cuda": ("nvidia[0-9]*", "dxg", "kfd"),
    "npu": ("davinci[0-9]*",),
    "sdaa": ("tcaicard[0-9]*",),
    "hpu": ("accel/accel[0-9]*",),
    "mlu": ("cambricon_dev[0-9]*",),
    "xpu": ("dri/renderD*",),  # last: other vendors' graphics have such files too
}


def likely_accelerator(environ: Mapping[str, str], device_folder: Path = Path("/dev"), platform: str = sys.platform) -> str:
    """The accelerator that ranks will probably use: DS_ACCELERATOR, else by the device files, else `cpu`.

    Args:
        environ: where DS_ACCELERATOR is read.
        device_folder: where the device files are.
        platform: as `sys.platform`.
    """
    forced = environ.get("DS_ACCELERATOR", "").strip().lower()
    if forced:
        return forced
    if platform == "darwin":
        return "mps"
    found = (name for name, patterns in _DEVICE_FILES.items() if any(any(device_folder.glob(each)) for each in patterns))
    name = next(found, "cpu")
    return "cpu" if hides_all(environ.get(VISIBLE_DEVICES[name])) else name


def visible_devices_name(environ: Mapping[str, str]) -> str:
    """The variable that limits the devices a rank sees on this machine."""
    return VISIBLE_DEVICES.get(likely_accelerator(environ), VISIBLE_DEVICES["cpu"])


def hides_all(value: str | None) -> bool:
    """Whether a visible-devices variable is set so that no device is seen: such a job runs on the CPU."""
    return value is not None and value.strip() in ("", "-1")


def parse_visible_devices(value: str) -> list[Slot]:
    """Read `0,2` as [0, 2]; names (UUIDs of GPUs or their parts) stay text."""
    return [int(part) if part.isdecimal() else part for part in map(str.strip, value.split(",")) if part]


def devices_from_slurm(environ: Mapping[str, str]) -> list[Slot]:
    """The devices of this host that Slurm gave to the step, as it says in the visible-devices variable; [] when none.

    A variable that merely came along from the front end does not count.
    """
    if not any(environ.get(name) for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE")):
        return []
    return parse_visible_devices(environ.get(visible_devices_name(environ), ""))


def count_devices(environ: Mapping[str, str]) -> int | None:
    """Devices of this machine, those included that a visible-devices variable hides; None when ranks run on the CPU.

    Imports torch only when a device file says that there may be an accelerator.
    """
    if likely_accelerator(environ) == "cpu":
        return None
    hidden = os.environ.pop(visible_devices_name(environ), None)
    try:
        # Not at the top of the file: it would make every start of a job wait for torch.
        accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
        return None if accelerator.device_name() == "cpu" else int(accelerator.device_count())
    finally:
        if hidden is not None:
            os.environ[visible_devices_name(environ)] = hidden
