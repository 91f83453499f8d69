"""Optimizer steps on accelerators as Triton kernels: one launch for all tensors of a batch, one trip to memory.

    can_run(device, dtype)                 where false, the optimizers use torch's calls on lists
    lion_step                              one kernel
    lamb_update, then lamb_apply           two, with the sums of squares in between, which may cross ranks

Adam needs none of this: torch's fused kernel serves it. Triton comes with torch for the devices that it knows; it is loaded
at the first step and compiles its kernels then, some tenths of a second each, into its own cache: no lock waits there.

Not here: host memory (`ops.host_step`). Called by `ops.lion` and `ops.lamb`.
"""

from __future__ import annotations

from deepspeed.ops.device.lamb import lamb_apply, lamb_update
from deepspeed.ops.device.lion import lion_step
from deepspeed.ops.device.table import can_run

__all__ = ["can_run", "lamb_apply", "lamb_update", "lion_step"]
