"""The command `ds_elastic`: which batch and which numbers of ranks a configuration's `elasticity` gives.

Does not live here: the arithmetic (`config.elastic_batch`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from deepspeed.config.load import load_config
from deepspeed.elasticity.elasticity import compute_elastic_config
from deepspeed.errors import DeepSpeedError
from deepspeed.version import version

__all__ = ["main"]

_RULE = "-" * 42


def main(words: Sequence[str] | None = None) -> None:
    """Run the command; None means the words of this process. Exits with status 1 and the reason when there is no batch."""
    parser = argparse.ArgumentParser(prog="ds_elastic", description="Show the elastic batch of a configuration.")
    parser.add_argument("-c", "--config", required=True, help="the configuration: a JSON or HJSON file")
    parser.add_argument(
        "-w", "--world-size", type=int, default=0, help="ranks to compute the micro-batch for; default: none"
    )
    args = parser.parse_args(words)
    try:
        sys.stdout.write(_report(args.config, args.world_size))
    except DeepSpeedError as error:
        sys.exit(f"ds_elastic: {error}")


def _report(path: str, world_size: int) -> str:
    config = load_config(path)
    results = compute_elastic_config(config, version, world_size)
    lines = [_RULE, "Elasticity config:", _RULE, json.dumps(config["elasticity"], indent=4, sort_keys=True)]
    ranks = f" for world size {world_size}" if world_size > 0 else ""
    lines += [_RULE, f"Calculated results{ranks}:", _RULE]
    names = ("final_batch_size ....", "valid_gpus ..........", "micro_batch_size ....")
    lines += [f"{name} {result}" for name, result in zip(names, results, strict=False)]
    return "\n".join([*lines, ""])
