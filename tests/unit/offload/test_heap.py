from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

JOB = """
import sys, torch
from deepspeed.config.zero import ZeroConfig
from deepspeed.offload.heap import give_back_freed

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS:")) / 1024

zero = ZeroConfig.model_validate({"stage": 3, "offload_param": {"device": sys.argv[1], "nvme_path": "/fast"}})
torch.zeros(1 << 22).add_(1)  # raises glibc's threshold: blocks up to this size stay from now on
before = resident()
blocks = [torch.zeros(1 << 20).add_(1) for _ in range(64)]  # 4 MiB each
pin = torch.ones(1 << 18)  # above them in the heap
del blocks
give_back_freed(zero)
print(resident() - before)
"""


def _kept_mib(device: str) -> float:
    command = [sys.executable, "-c", JOB, device]
    return float(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library gives freed memory back itself")
def test_freed_memory_goes_back_to_the_system_where_a_tier_is_on_a_disk() -> None:
    assert _kept_mib("nvme") < 64
    assert _kept_mib("none") > 192  # what is measured is really there: 256 MiB were freed
