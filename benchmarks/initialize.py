"""How long does `deepspeed.initialize` take, and does it compile anything?

Goals: at most 0.25 of the original's time, which was measured at 3.3 to 4.7 s with its operators compiled before; and no
file compiled on a first start, where the original needs about two minutes (`run.py --cold` times that).

Measured around the call, with the package imported and the ranks already met. The first training step is timed as well:
what a package leaves for later shows there. The 30M case feeds 2 tokens a row, so that it is no benchmark of arithmetic.
DistributedDataParallel with torch's fused AdamW stands beside them. The folder for compiled operators is empty at every
start, except the original's, which a run before the first pair has filled.

At ZeRO stages 1, 2 and 3 the goal is the same, and torch's peer of the stage takes DistributedDataParallel's place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.cases import ORIGINAL, OURS, Case, Goal, Measured
from benchmarks.harness.models import build_model, make_batches
from benchmarks.harness.probes import processor_seconds
from benchmarks.harness.trainers import DDP, PEER_OF_STAGE, Training, join, make_trainer, rank

_TINY = {"width": 32, "layers": 2, "heads": 2, "vocabulary": 64, "positions": 16}


def _case(title: str, ranks: int, peer: str = DDP, **arguments: Any) -> Case:
    return Case(
        f"initialize {title}",
        benchmark=__name__.rpartition(".")[2],
        contenders=(OURS, peer, ORIGINAL),
        figures=("initialize_s", "initialize_cpu_s", "first_step_s", "compiled_files"),
        of=ORIGINAL,
        ranks=ranks,
        goals=(Goal("initialize_s", 0.25, of=ORIGINAL), Goal("compiled_files", 0)),
        pairs=3,
        arguments=arguments,
    )


_30M: dict[str, Any] = {"dtype": "bf16", "model": {"positions": 2}}

CASES = (
    _case("tiny", 1, model=_TINY),
    _case("30M bf16", 2, **_30M),
    *(_case(f"stage {stage} tiny", 1, peer, stage=stage, model=_TINY) for stage, peer in PEER_OF_STAGE.items()),
    *(_case(f"stage {stage} 30M bf16", 2, peer, stage=stage, **_30M) for stage, peer in PEER_OF_STAGE.items()),
)
WARM_UP = tuple(_case(f"warm-up {dtype}", 2, model=_TINY, dtype=dtype) for dtype in ("fp32", "bf16"))
"""What makes the original compile whatever the other benchmarks need."""
COLD = Case(
    "cold start",
    benchmark=__name__.rpartition(".")[2],
    contenders=(OURS, ORIGINAL),
    figures=("process_s", "initialize_s", "first_step_s", "compiled_files"),
    of=ORIGINAL,
    ranks=2,
    goals=(Goal("compiled_files", 0),),
    pairs=1,
    side_pairs=1,
    arguments={"model": _TINY},
)


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    training = Training.of(arguments)
    model = build_model(arguments)
    batch = make_batches(model, training.rows, rank())[0]
    join(contender)
    files, began, used = _compiled_files(), time.perf_counter(), processor_seconds()
    micro_step = make_trainer(contender, model, training)
    ready = time.perf_counter()
    used = processor_seconds() - used
    micro_step(batch, True)
    stepped = time.perf_counter()
    return Measured(
        {
            "initialize_s": ready - began,
            "initialize_cpu_s": used,
            "first_step_s": stepped - ready,
            "compiled_files": float(_compiled_files() - files),
        }
    )


def _compiled_files() -> int:
    return sum(1 for file in Path(os.environ["TORCH_EXTENSIONS_DIR"]).rglob("*") if file.is_file())
