"""The commands `zero_to_fp32` and `zero_to_torch`: the weights of a checkpoint as files. For our layout no torch is loaded.

Does not live here: the work (`files`). Called as `python -m deepspeed.utils.zero_to_fp32`, and by the scripts that a save
leaves next to `latest` (`save.scripts`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from deepspeed.checkpoint.export.files import DTYPES, export_weights, parse_dtype, planned_nbytes
from deepspeed.checkpoint.export.weights_source import WeightsSource, open_weights
from deepspeed.checkpoint.export.weights_table import Kind, Weight, list_weights
from deepspeed.common.logging import set_log_level_from_string
from deepspeed.errors import DeepSpeedError

__all__ = ["zero_to_fp32", "zero_to_torch"]


def zero_to_fp32(arguments: Sequence[str] | None = None) -> int:
    """Run the command `zero_to_fp32`; return the exit status."""
    parser = _parser("zero_to_fp32", "Write the fp32 weights of a checkpoint as pytorch_model.bin or model.safetensors.")
    parsed = parser.parse_args(arguments)
    return _run("zero_to_fp32", parsed, "fp32")


def zero_to_torch(arguments: Sequence[str] | None = None) -> int:
    """Run the command `zero_to_torch`; return the exit status."""
    parser = _parser("zero_to_torch", "Write the weights of a checkpoint, in a chosen type, as files that torch loads.")
    parser.add_argument("--dtype", required=True, choices=DTYPES, help="type of all floating-point values")
    parsed = parser.parse_args(arguments)
    return _run("zero_to_torch", parsed, parsed.dtype)


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument("checkpoint_dir", help="folder that holds the tags and the file 'latest'")
    parser.add_argument("output_dir", help="folder for pytorch_model.bin or model.safetensors, whole or in shards")
    parser.add_argument(
        "--max_shard_size",
        default="5GB",
        help="limit of one file, such as 500MB or 5GB (default %(default)s); a larger tensor gets a file of its own",
    )
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of torch files")
    parser.add_argument("-t", "--tag", default=None, help="which checkpoint; the one that 'latest' names if left out")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    parser.add_argument("-d", "--debug", action="store_true", help="say more, and show where an error comes from")
    return parser


def _run(name: str, parsed: argparse.Namespace, dtype: str) -> int:
    if parsed.debug:
        set_log_level_from_string("debug")
    try:
        _export(parsed, dtype)
    except DeepSpeedError as error:
        if parsed.debug:
            raise
        sys.stderr.write(f"{name}: {error}\n")
        return 1
    return 0


def _export(parsed: argparse.Namespace, dtype: str) -> None:
    out = Console(highlight=False, soft_wrap=True, markup=False)
    source = open_weights(parsed.checkpoint_dir, parsed.tag)
    weights = list_weights(source.tensors, source.state, exclude_frozen=parsed.exclude_frozen_parameters)
    file_dtype = parse_dtype(dtype)
    for line in _describe(source, weights, dtype):
        out.print(line)
    total_nbytes = planned_nbytes(weights, file_dtype, safe_serialization=parsed.safe_serialization)
    with _bar() as bar:
        task = bar.add_task("Saving", total=total_nbytes)
        files = export_weights(
            source,
            parsed.output_dir,
            dtype=file_dtype,
            max_shard_size=parsed.max_shard_size,
            safe_serialization=parsed.safe_serialization,
            exclude_frozen=parsed.exclude_frozen_parameters,
            progress=lambda file, nbytes: bar.update(task, advance=nbytes, description=file),
        )
    for file in files:
        out.print(f"Saved {file}")


def _bar() -> Progress:
    """A progress bar in bytes on standard error; nothing is shown where that is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _describe(source: WeightsSource, weights: Sequence[Weight], dtype: str) -> list[str]:
    """What is said before the work; scripts look for these lines."""
    state = source.state
    lines = [f"Processing zero checkpoint '{source.folder}'"]
    if source.written_by is not None:
        lines.append(f"Parsing checkpoint created by deepspeed=={source.written_by}")
    lines.append(f"Detected checkpoint of type zero stage {state['zero_stage']}, world_size: {state['dp_world_size']}")
    for kind, title in ((Kind.FROZEN, "Frozen "), (Kind.TRAINED, "")):
        found = [weight for weight in weights if weight.kind is kind and weight.owner is None]
        if found or kind is Kind.TRAINED:
            numel = sum(weight.numel for weight in found)
            lines.append(f"Reconstructed {title}{dtype} state dict with {len(found)} params {numel} elements")
    return lines
