"""The command `deepspeed-config`: check a configuration file, print its JSON Schema or the reference page.

    deepspeed-config check FILE [--world-size N]    the resolved configuration, or all faults and exit status 1
    deepspeed-config schema                         JSON Schema, for editors
    deepspeed-config reference                      docs/reference/config.md

Lives here: the command line. Does not live here: checking (`config.root`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed.config.load import load_config
from deepspeed.config.reference import reference_page
from deepspeed.config.root import DeepSpeedConfig
from deepspeed.config.schema import json_schema
from deepspeed.errors import ArgumentError, ConfigError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 for a faulty configuration, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(prog="deepspeed-config", description="Check and describe configurations.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="print the resolved configuration, or all faults (exit status 1)")
    check.add_argument("file", help="path of a JSON or HJSON file, or base64 of such a text")
    check.add_argument("--world-size", type=int, help="ranks of the job; left out: what the batch sizes imply, else 1")
    commands.add_parser("schema", help="print the JSON Schema of a configuration file")
    commands.add_parser("reference", help="print the reference page")
    args = parser.parse_args(argv)
    if args.command == "check":
        return _check(args.file, args.world_size)
    text = reference_page() if args.command == "reference" else json.dumps(json_schema(), indent=2) + "\n"
    sys.stdout.write(text)
    return 0


def _check(source: str, world_size: int | None) -> int:
    if world_size is not None and world_size < 1:
        sys.stderr.write(f"deepspeed-config: --world-size {world_size}; needed 1 or more.\n")
        return 2
    try:
        ranks = world_size or _implied_ranks(load_config(source))
        config = DeepSpeedConfig(source, world_size=ranks)
    except (ConfigError, ArgumentError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(config.resolved(), indent=2, default=str) + "\n")
    return 0


def _implied_ranks(raw: Mapping[str, Any]) -> int:
    """Return the ranks that three given batch sizes multiply out for, or 1."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sizes = [raw.get(key) for key in keys]
    if not all(isinstance(size, (int, float)) and size >= 1 for size in sizes):
        return 1
    train, micro, accumulation = (int(size) for size in sizes if size is not None)
    return max(1, train // (micro * accumulation)) * int(raw.get("sequence_parallel_size") or 1)


if __name__ == "__main__":
    sys.exit(main())
