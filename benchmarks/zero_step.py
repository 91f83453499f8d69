"""How long is one training step at ZeRO stages 1, 2 and 3, two ranks, the GPT of `train_step`?

Goals, each for accumulation 1 and 4:

| stage | torch's peer | ours / peer, bf16 and fp32 | ours / original, bf16 and fp32 |
|---|---|---|---|
| 1 | DDP with ZeroRedundancyOptimizer | 0.80, 0.90 | 0.60, 0.70 |
| 2 | FSDP2, parameters gathered once per step | 0.65, 0.80 | 0.60, 0.70 |
| 3 | FSDP2, parameters released after forward | 0.60, 0.75 | 0.60, 0.70 |

At stage 3 ours runs twice. `ours` has default keys: parameters stay gathered from forward to backward. `ours, regathering`
has `stage3_max_reuse_distance: 0`: they are gathered a second time in backward, so that no more is held than FSDP2 holds,
and the goals are its. The original has default keys.

Measured, and losses compared, as in `train_step`. `forward+backward` runs in the cases of stage 1 only: no stage changes it.
"""

from __future__ import annotations

from benchmarks.harness.cases import ORIGINAL, Case, Goal
from benchmarks.harness.trainers import FLOOR, OURS_AT_STAGE, PEER_OF_STAGE, contenders_at_stage

_OF_ORIGINAL = {"bf16": 0.60, "fp32": 0.70}
_OF_PEER = {
    1: {"bf16": 0.80, "fp32": 0.90},
    2: {"bf16": 0.65, "fp32": 0.80},
    3: {"bf16": 0.60, "fp32": 0.75},
}
_STEPS = {
    1: {"warm": 2, "steps": 6},
    4: {"warm": 1, "steps": 3},
}  # by accumulation; stage 3 learns an order while it warms up


def _case(stage: int, dtype: str, accumulation: int) -> Case:
    peer, ours = PEER_OF_STAGE[stage], OURS_AT_STAGE[stage]
    return Case(
        f"zero_step stage {stage} {dtype} accumulation {accumulation}",
        benchmark="train_step",
        contenders=contenders_at_stage(stage, *((FLOOR,) if stage == 1 else ())),
        figures=("step_ms", "first_loss", "last_loss"),
        of=peer,
        ranks=2,
        goals=(
            Goal("step_ms", _OF_PEER[stage][dtype], of=peer, contender=ours),
            Goal("step_ms", _OF_ORIGINAL[dtype], of=ORIGINAL, contender=ours),
        ),
        pairs=3,
        side_pairs=1,
        multiplies_bf16=dtype == "bf16",
        loss_tolerance={"bf16": 1e-2, "fp32": 1e-4}[dtype],
        arguments={"stage": stage, "dtype": dtype, "accumulation": accumulation, **_STEPS[accumulation]},
    )


CASES = tuple(
    _case(stage, dtype, accumulation) for stage in (1, 2, 3) for dtype in ("bf16", "fp32") for accumulation in (1, 4)
)
