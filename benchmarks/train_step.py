"""How long is one ZeRO stage-0 training step of a 29.5-million-parameter GPT on two ranks?

Goals: at most 0.90 of DistributedDataParallel's time in bf16 and 0.95 in fp32.

Model: width 512, 8 layers, 8 heads, vocabulary 4096, 128 positions, micro-batches of 2 rows, random tokens. A run's
figure is the median of its timed steps on the slowest rank; loading data and reading the loss are outside. Accumulation 4
means four micro-batches per rank and step. `forward+backward` is what is left when nothing is reduced and nothing
updated.

The losses of the first and the last step must agree with ours, or the comparison is void: to 1e-4 in fp32, where only the
order of sums differs, and to 1e-2 in bf16 (2.5 units in its last place), where contenders round in different places. In
bf16 the original's last loss is shown but not compared: its optimizer counts one step more than it was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.cases import ORIGINAL, OURS, Case, Goal, Measured
from benchmarks.harness.models import build_model, make_batches
from benchmarks.harness.trainers import DDP, FLOOR, Training, join, make_trainer, rank, run_steps

_AT_MOST = {"bf16": 0.90, "fp32": 0.95}
_LOSS_TOLERANCE = {"bf16": 1e-2, "fp32": 1e-4}
_STEPS = {1: {"warm": 1, "steps": 6}, 4: {"warm": 1, "steps": 2}}  # by accumulation

CASES = tuple(
    Case(
        f"train_step {dtype} accumulation {accumulation}",
        benchmark=__name__.rpartition(".")[2],
        contenders=(OURS, DDP, FLOOR, ORIGINAL),
        figures=("step_ms", "first_loss", "last_loss"),
        of=DDP,
        ranks=2,
        goals=(Goal("step_ms", _AT_MOST[dtype], of=DDP),),
        side_pairs={1: 2, 4: 1}[accumulation],
        multiplies_bf16=dtype == "bf16",
        loss_tolerance=_LOSS_TOLERANCE[dtype],
        loss_exempt=frozenset({(ORIGINAL, "last")} if dtype == "bf16" else {}),
        arguments={"dtype": dtype, "accumulation": accumulation, **_STEPS[accumulation]},
    )
    for dtype in ("bf16", "fp32")
    for accumulation in (1, 4)
)


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    training = Training.of(arguments)
    model = build_model(arguments)
    batches = make_batches(model, training.rows, rank())
    join(contender)
    micro_step = make_trainer(contender, model, training)
    steps = run_steps(micro_step, batches, training.accumulation, arguments["warm"], arguments["steps"])
    losses = {"first": steps.first_loss} if contender == FLOOR else {"first": steps.first_loss, "last": steps.last_loss}
    return Measured({"step_ms": steps.seconds * 1e3}, losses)
