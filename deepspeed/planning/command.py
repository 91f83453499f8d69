"""`deepspeed plan`: what each rank would hold and send.

    deepspeed plan --params 13e9 --world-size 16 --device-memory 80GB
    deepspeed plan path/to/config.json --config ds_config.json --world-size 64 --device-memory 80GB --sequence-length 4096
    deepspeed plan my_module:build --config ds_config.json --world-size 8 --json
    deepspeed plan --params 7e9 --world-size 8 --dtype fp32 --optimizer Lion --html plan.html

Called by `launcher.runner`. Does not live here: numbers (`comparison`), tables (`text`, `page`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from deepspeed.common.pages import write_page
from deepspeed.errors import DeepSpeedError
from deepspeed.planning.comparison import Comparison
from deepspeed.planning.page import page
from deepspeed.planning.planned import plan
from deepspeed.planning.text import show

__all__ = ["main", "nbytes_of"]

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_DTYPES = ("bf16", "fp16", "fp32")


def nbytes_of(text: str) -> int:
    """Read `80GB`, `141GiB`, `8e10`.

    Raises:
        ArgumentTypeError: it is no such text.
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 80GB, 141GiB or 8e10")
    return int(float(found[1]) * _SIZES[found[2] or ""])


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit status: 0, or 2 where the model or the configuration cannot be planned for."""
    args = _parser().parse_args(words)
    if (args.model is None) == (args.params is None):
        _parser().error("give either a model or --params, such as --params 13e9")
    if args.config is not None and (args.dtype or args.optimizer):
        _parser().error("--dtype and --optimizer stand for a configuration: leave them out, or --config")
    source = args.params if args.model is None else args.model
    try:
        found = plan(
            source,
            args.config if args.config is not None else _config(args),
            args.world_size,
            args.device_memory,
            sequence_length=args.sequence_length,
            device_type=args.device,
        )
        _write(found, args)
    except (DeepSpeedError, OSError) as error:
        sys.stderr.write(f"deepspeed plan: {error}\n")
        return 2
    return 0


def _config(args: argparse.Namespace) -> dict[str, Any]:
    """What stands for a configuration."""
    dtype = args.dtype or _DTYPES[0]
    formats = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    return {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": args.optimizer or "AdamW", "params": {}}, **formats}


def _write(found: Comparison, args: argparse.Namespace) -> None:
    if args.html is not None:
        write_page(args.html, page(found, args.bandwidth), "give --html another FILE.")
    if args.json:
        sys.stdout.write(json.dumps(found.as_dict(), indent=1) + "\n")
    elif args.html is None:
        show(found, Console(highlight=False), args.bandwidth)
    else:
        sys.stdout.write(f"{args.html}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepspeed plan",
        description="Say what each rank will hold and send under a configuration, and under its neighbours, before anything "
        "is allocated.",
    )
    parser.add_argument("model", nargs="?", help="a Hugging Face folder, config.json or name; or module:function")
    parser.add_argument("--params", type=float, metavar="N", help="only a number of parameters, such as 13e9")
    parser.add_argument("--config", metavar="FILE", help="configuration; default: bf16 with AdamW, or what the next two say")
    parser.add_argument("--dtype", choices=_DTYPES, help="format of the model, without --config")
    parser.add_argument("--optimizer", metavar="TYPE", help="as the configuration names it, without --config")
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks")
    parser.add_argument("--device-memory", type=nbytes_of, metavar="SIZE", help="of one device, such as 80GB")
    parser.add_argument(
        "--sequence-length", type=int, metavar="N", help="tokens of a row; default: the model's, at most 2048"
    )
    parser.add_argument("--bandwidth", type=float, metavar="GB/S", help="that a rank sends at; adds the time of the traffic")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="on a cpu, host memory is the device's")
    parser.add_argument("--json", action="store_true", help="plain values instead of tables")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the tables as one page, which needs no network")
    return parser
