"""The command `ds_to_universal`: one checkpoint, of any layout, as a universal folder that the original resumes from.

    python -m deepspeed.checkpoint.ds_to_universal --input_folder DIR/TAG --output_folder DIR/TAG_universal

Does not live here: the conversion (`original.writing.to_universal`). Called as a module, as the console script, by tests.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deepspeed.checkpoint.agreement import Alone
from deepspeed.checkpoint.disk.layouts import layout_of
from deepspeed.checkpoint.disk.tags import describe_tags, list_tags
from deepspeed.checkpoint.opening import open_folder
from deepspeed.checkpoint.original.writing.to_universal import write_universal
from deepspeed.errors import ArgumentError, CheckpointNotFoundError, DeepSpeedError

__all__ = ["main"]

_NAME = "ds_to_universal"


class _Part(Alone):
    """One of several threads that check files: which share of them."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parsed = _parser().parse_args(arguments)
    sys.stdout.write(f"args = {parsed}\n")
    try:
        _convert(parsed)
    except (DeepSpeedError, OSError) as error:
        sys.stderr.write(f"{_NAME}: {error}\n")
        return 1
    sys.stdout.write(f"Converted {parsed.input_folder} to {parsed.output_folder}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_NAME,
        description="Write one checkpoint, of any layout, as a universal folder: ZeRO stages 1 to 3 of the original resume "
        "from it on any number of ranks, and so does this library (which resumes from every layout directly).",
    )
    add = parser.add_argument
    add("--input_folder", type=Path, required=True, help="folder of one tag, e.g. checkpoints/global_step100")
    add("--output_folder", type=Path, required=True, help="folder of the new tag; replaced once the new one is whole")
    add("--num_extract_workers", type=int, default=4, help="threads that check the input's files first (%(default)s)")
    add("--num_merge_workers", type=int, default=2, help="threads that write parameters (%(default)s)")
    add("--keep_temp_folder", action="store_true", help="leave what was written next to the output if the conversion fails")
    add("--no_strict", dest="strict", action="store_false", help="let patterns of universal_checkpoint_info match nothing")
    add(
        "--inject_missing_state",
        action="store_true",
        help="take stage files without universal_checkpoint_info as those of a model without tensor parallelism",
    )
    return parser


def _convert(parsed: argparse.Namespace) -> None:
    _check(parsed)
    folder: Path = parsed.input_folder
    with _bars() as bars:
        checking = bars.add_task("Checking files", total=parsed.num_extract_workers)
        parts = [_Part(rank, parsed.num_extract_workers) for rank in range(parsed.num_extract_workers)]
        with ThreadPoolExecutor(len(parts)) as pool:
            for _ in pool.map(lambda part: open_folder(folder, folder.name, part).check_own_share(), parts):
                bars.advance(checking)
        source = open_folder(folder, folder.name, Alone())
        writing = bars.add_task("Writing parameters", total=None)
        write_universal(
            source,
            parsed.output_folder,
            workers=parsed.num_merge_workers,
            inject_missing_state=parsed.inject_missing_state,
            keep_temp_folder=parsed.keep_temp_folder,
            strict=parsed.strict,
            progress=lambda done, total: bars.update(writing, completed=done, total=total),
        )


def _check(parsed: argparse.Namespace) -> None:
    """
    Raises:
        ArgumentError: the numbers or folders make no sense.
        CheckpointNotFoundError: the input is not the folder of a tag.
    """
    for option in ("num_extract_workers", "num_merge_workers"):
        if getattr(parsed, option) < 1:
            raise ArgumentError(f"--{option} {getattr(parsed, option)}: at least 1 is needed.")
    source, output = parsed.input_folder.resolve(), parsed.output_folder.resolve()
    if output == source or source in output.parents or output in source.parents:
        raise ArgumentError(
            f"--output_folder {parsed.output_folder} and --input_folder {parsed.input_folder} lie in one another. Give a "
            f"folder beside the input, e.g. {parsed.input_folder}_universal."
        )
    if layout_of(parsed.input_folder) is not None:
        return
    tags = list_tags(parsed.input_folder)
    if tags:
        raise CheckpointNotFoundError(
            f"--input_folder {parsed.input_folder} is the folder of all tags. {describe_tags(parsed.input_folder)} Give "
            f"one of them, e.g. --input_folder {parsed.input_folder / tags[-1]}."
        )
    fault = "holds no checkpoint" if parsed.input_folder.is_dir() else "is no folder"
    raise CheckpointNotFoundError(
        f"--input_folder {parsed.input_folder} {fault}. Give the folder of one tag. In the folder above it: "
        f"{', '.join(map(repr, list_tags(parsed.input_folder.parent))) or 'none'}."
    )


def _bars() -> Progress:
    """Progress bars on standard error; nothing is shown where that is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not console.is_terminal)


if __name__ == "__main__":
    sys.exit(main())
