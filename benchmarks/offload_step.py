"""How long is a step with the optimizer offloaded: one rank, ZeRO stage 3, the GPT of `train_step` in bf16?

| tier | contenders | goals: ours is at most |
|---|---|---|
| cpu | ours, the original | 0.75 of the original |
| nvme | ours (overlapped), with small buffers, on the CPU tier; the original | 1.3 of our CPU tier, 0.60 of the original |

Masters and moments are 354 MB. With default keys ours keeps at most three quarters of them in memory, and a step reads and
writes the other 88 MB; `ours, small buffers` has a `sub_group_size` of 2**20, so that buffers hold 4 x 4 MiB. The original
keeps all of a sub-group in its buffers, with default keys everything, and runs without `pipeline_read` and `pipeline_write`:
with them it stops (AssertionError). Losses are compared as in `train_step`. Files are on the disk of `--work`: its speed is
a part of every figure of the tier nvme.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.cases import ORIGINAL, OURS, Case, Goal, Measured
from benchmarks.harness.models import build_model, make_batches
from benchmarks.harness.trainers import Training, join, make_trainer, rank, run_steps

_SMALL = "ours, small buffers"
_ON_CPU = "ours, cpu tier"
_OVERLAPPED = {"device": "nvme", "pipeline_read": True, "pipeline_write": True}
_ZERO: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "cpu": {name: {"offload_optimizer": {"device": "cpu"}} for name in (OURS, ORIGINAL)},
    "nvme": {
        OURS: {"offload_optimizer": _OVERLAPPED},
        _SMALL: {"offload_optimizer": _OVERLAPPED, "sub_group_size": 1 << 20},
        _ON_CPU: {"offload_optimizer": {"device": "cpu"}},
        ORIGINAL: {"offload_optimizer": {"device": "nvme"}},
    },
}


def _case(tier: str, of: str, *goals: Goal) -> Case:
    benchmark = __name__.rpartition(".")[2]
    arguments = {"dtype": "bf16", "stage": 3, "tier": tier}
    tiny = {"model": {"width": 32, "layers": 1, "heads": 2, "vocabulary": 64, "positions": 16}, "warm": 1, "steps": 1}
    return Case(
        f"offload_step {tier}",
        benchmark=benchmark,
        contenders=tuple(_ZERO[tier]),
        figures=("step_ms", "first_loss", "last_loss"),
        of=of,
        goals=goals,
        pairs=3,
        side_pairs=3,
        multiplies_bf16=True,
        loss_tolerance=1e-2,
        loss_exempt=frozenset({(ORIGINAL, "last")}),  # it counts one step more than it was given
        arguments={**arguments, "warm": 2, "steps": 8},
        warm_up=Case(
            f"offload_step {tier}, warm-up", benchmark, (ORIGINAL,), ("step_ms",), ORIGINAL, arguments={**arguments, **tiny}
        ),
    )


CASES = (
    _case("cpu", ORIGINAL, Goal("step_ms", 0.75, of=ORIGINAL)),
    _case("nvme", _ON_CPU, Goal("step_ms", 1.3, of=_ON_CPU), Goal("step_ms", 0.60, of=ORIGINAL)),
)


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    zero = dict(_ZERO[arguments["tier"]][contender])
    if zero["offload_optimizer"]["device"] == "nvme":
        folder = Path(arguments["scratch"]) / "nvme"
        folder.mkdir(exist_ok=True)
        zero["offload_optimizer"] = {**zero["offload_optimizer"], "nvme_path": str(folder)}
    training = Training.of({**arguments, "zero": zero})
    model = build_model(arguments)
    engine = ORIGINAL if contender == ORIGINAL else OURS
    join(engine)
    batches = make_batches(model, training.rows, rank())
    steps = run_steps(make_trainer(engine, model, training), batches, 1, arguments["warm"], arguments["steps"])
    return Measured({"step_ms": steps.seconds * 1e3}, {"first": steps.first_loss, "last": steps.last_loss})
