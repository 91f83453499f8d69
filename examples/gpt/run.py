"""The whole example in one command: train half way, save, start again from the checkpoint, finish.

        python examples/gpt/run.py [--steps N] [any option of train.py]

On a machine with GPUs the launcher takes all of them; on a CPU two ranks share the cores.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from starting import launch


def main() -> int:
    """Run both launches; returns the exit status of the first that failed, or 0."""
    parser = argparse.ArgumentParser(description="Train the example GPT in two launches.", epilog="See train.py --help.")
    parser.add_argument("--steps", type=int, default=2800, help="optimizer steps of both launches together")
    args, more = parser.parse_known_args()
    train = [os.path.relpath(Path(__file__).with_name("train.py")), "--steps", str(args.steps), *more]
    started = time.monotonic()
    for phase in (["--until", str(args.steps // 2)], ["--resume"]):
        status = launch([*train, *phase])
        if status:
            return status
    print(f"both launches took {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
