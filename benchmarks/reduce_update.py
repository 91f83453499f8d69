"""What does a stage-0 step on two ranks cost beside the model's own arithmetic?

Measured as `train_step` is, on the same parameters without the model: each parameter gets a gradient of full size from
one element-wise pass (which `forward+backward` shows alone), then gradients are reduced and weights updated as ever. No
goal; it says where a ratio of `train_step` comes from, and it says it for bf16 also on a processor that cannot multiply
bf16.
"""

from __future__ import annotations

from benchmarks.harness.cases import ORIGINAL, OURS, Case
from benchmarks.harness.trainers import DDP, FLOOR

CASES = tuple(
    Case(
        f"reduce_update {dtype}",
        benchmark="train_step",
        contenders=(OURS, DDP, FLOOR, ORIGINAL),
        figures=("step_ms", "first_loss", "last_loss"),
        of=DDP,
        ranks=2,
        pairs=3,
        side_pairs=1,
        loss_tolerance={"bf16": 1e-2, "fp32": 1e-4}[dtype],
        loss_exempt=frozenset({(ORIGINAL, "last")} if dtype == "bf16" else {}),  # as in train_step
        arguments={"bare": True, "dtype": dtype, "warm": 2, "steps": 8},
    )
    for dtype in ("bf16", "fp32")
)
