"""`deepspeed plan`: what each rank would hold and send.

    deepspeed plan --params 13e9 --world-size 16 --device-memory 80GB
    deepspeed plan path/to/config.json --config ds_config.json --world-size 64 --device-memory 80GB --sequence-length 4096
    deepspeed plan my_module:build --config ds_config.json --world-size 8 --json

Called by `launcher.runner`. Does not live here: numbers (`comparison`), tables (`text`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence

from rich.console import Console

from deepspeed.errors import DeepSpeedError
from deepspeed.planning.comparison import plan
from deepspeed.planning.text import show

__all__ = ["main", "nbytes_of"]

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_DEFAULT_CONFIG = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
_ADAM = {"optimizer": {"type": "AdamW", "params": {}}}


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
    source = args.params if args.model is None else args.model
    config = args.config if args.config is not None else {**_DEFAULT_CONFIG, **_ADAM}
    try:
        found = plan(source, config, args.world_size, args.device_memory, sequence_length=args.sequence_length)
    except DeepSpeedError as error:
        sys.stderr.write(f"deepspeed plan: {error}\n")
        return 2
    if args.json:
        sys.stdout.write(json.dumps(found.as_dict(), indent=1) + "\n")
    else:
        show(found, Console(highlight=False), args.bandwidth)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepspeed plan",
        description="Say what each rank will hold and send under a configuration, and under its neighbours, before anything "
        "is allocated.",
    )
    parser.add_argument("model", nargs="?", help="a Hugging Face folder, config.json or name; or module:function")
    parser.add_argument("--params", type=float, metavar="N", help="only a number of parameters, such as 13e9")
    parser.add_argument("--config", metavar="FILE", help="configuration; default: bf16 with AdamW")
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks")
    parser.add_argument("--device-memory", type=nbytes_of, metavar="SIZE", help="of one device, such as 80GB")
    parser.add_argument(
        "--sequence-length", type=int, metavar="N", help="tokens of a row; default: the model's, at most 2048"
    )
    parser.add_argument("--bandwidth", type=float, metavar="GB/S", help="that a rank sends at; adds the time of the traffic")
    parser.add_argument("--json", action="store_true", help="plain values instead of tables")
    return parser
