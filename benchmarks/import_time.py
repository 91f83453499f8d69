"""What does `import deepspeed` cost a program that has imported torch?

Goal: at most 0.10 s of processor time (the original was measured at 0.19 to 0.32 s of wall clock).

Measured as user and system time of this process and its children, around `import deepspeed` in a fresh process that has
imported torch. A package that loads its parts when they are first used moves the cost instead of saving it, so the second
figure goes on until `deepspeed.initialize` has been looked up: what a training script pays in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.cases import ORIGINAL, OURS, Case, Goal, Measured
from benchmarks.harness.probes import processor_seconds

CASES = (
    Case(
        "import",
        benchmark=__name__.rpartition(".")[2],
        contenders=(OURS, ORIGINAL),
        figures=("import_cpu_s", "with_initialize_cpu_s", "torch_cpu_s"),
        of=ORIGINAL,
        goals=(Goal("import_cpu_s", 0.10),),
        side_pairs=5,
    ),
)


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    times = [processor_seconds()]
    import torch  # noqa: F401

    times.append(processor_seconds())
    import deepspeed

    times.append(processor_seconds())
    _ = deepspeed.initialize
    times.append(processor_seconds())
    return Measured(
        {
            "torch_cpu_s": times[1] - times[0],
            "import_cpu_s": times[2] - times[1],
            "with_initialize_cpu_s": times[3] - times[1],
        }
    )
