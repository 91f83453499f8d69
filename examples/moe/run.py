"""The whole example in one command: train with the load-balancing loss and without it, and draw where the tokens went.

        python examples/moe/run.py [any option of train.py but --aux and --out]

On a machine with GPUs the launcher takes all of them; on a CPU two ranks share the cores. Results are in runs/moe.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from plot import draw_routing

sys.path.append(str(Path(__file__).parents[1] / "gpt"))

from starting import launch

RUNS = {"load-balancing loss x 0.01": ("balanced", "0.01"), "without it": ("alone", "0")}


def main() -> int:
    """Run both; returns the exit status of the first that failed, or 0."""
    out = Path("runs/moe")
    script = os.path.relpath(Path(__file__).with_name("train.py"))
    for folder, aux in RUNS.values():
        status = launch([script, *sys.argv[1:], "--aux", aux, "--out", str(out / folder)])
        if status:
            return status
    draw_routing({title: out / folder / "routing.csv" for title, (folder, _) in RUNS.items()}, out / "routing.png")
    print(f"drawn: {out / 'routing.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
