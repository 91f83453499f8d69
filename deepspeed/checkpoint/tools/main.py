"""The command line of `deepspeed-checkpoint`.

Exit status: 0 all is well; 1 damage was found, or two checkpoints differ; 2 wrong use, or nothing there to look at.

Lives here: arguments, dispatch, the progress line, errors as text. Does not live here: what the commands do (the other
modules of this folder). Called as the console script.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from deepspeed.checkpoint.tools.contents import show_checkpoint
from deepspeed.checkpoint.tools.damage import verify
from deepspeed.checkpoint.tools.diff import diff_checkpoints
from deepspeed.checkpoint.tools.exports import FORMS, export_checkpoint, merge_folders
from deepspeed.checkpoint.tools.listing import list_checkpoints
from deepspeed.checkpoint.tools.output import DAMAGED, WRONG_USE, Report, show
from deepspeed.checkpoint.tools.places import find_place
from deepspeed.errors import CheckpointNotFoundError, DeepSpeedError, UsageError

__all__ = ["main"]

_DIR_HELP = "folder of all tags, or that of one tag"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = _parser().parse_args(argv)
    try:
        report: Report = args.run(args)
        return show(report, as_json=args.json)
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        sys.stderr.close()
        return 0
    except (UsageError, CheckpointNotFoundError) as error:
        return _fail(error, WRONG_USE)
    except (DeepSpeedError, OSError) as error:
        return _fail(error, DAMAGED)


def _fail(error: Exception, status: int) -> int:
    sys.stderr.write(f"deepspeed-checkpoint: {error}\n")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepspeed-checkpoint",
        description="Look into checkpoints of any layout: our own, the original's stage files and universal folders.",
        epilog="Exit status: 0 all is well, 1 damaged or different, 2 wrong use.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], Report], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.add_argument("--json", action="store_true", help="print JSON instead of tables")
        command.set_defaults(run=run)
        return command

    ls = add("ls", _ls, "list the tags of a folder, and what interrupted saves left there")
    ls.add_argument("dir", type=Path, help="folder of all tags")
    inside = add("show", _show, "show what is inside one checkpoint")
    _add_place(inside)
    inside.add_argument(
        "--tensors", metavar="PATTERN", default="*", help='list only tensors like this, e.g. "master/*.bias"'
    )
    whole = add("verify", _verify, "compare every file with its checksum and name every fault; without a tag: of all tags")
    _add_place(whole)
    two = add("diff", _diff, "compare two checkpoints, per parameter")
    two.add_argument("a", type=Path, help=_DIR_HELP)
    two.add_argument("b", type=Path, help=_DIR_HELP)
    two.add_argument("--atol", type=float, default=0.0, help="absolute difference of values that is allowed (0)")
    two.add_argument("--rtol", type=float, default=0.0, help="the same as a part of the largest value of the tensor (0)")
    two.add_argument("--all", action="store_true", help="also list what is equal")
    two.add_argument("--parameters-only", action="store_true", help="leave the rest of the state out of the comparison")
    _add_export(add("export", _export, "write the weights alone, or a checkpoint in a layout of the original"))
    merge = add("merge", _merge, "put together what the nodes of a job saved with checkpoint.use_node_local_storage")
    merge.add_argument("dirs", type=Path, nargs="+", metavar="dir", help=f"of each node: {_DIR_HELP}")
    merge.add_argument("out", type=Path, help="folder of tags to write into")
    merge.add_argument("--tag", help="which checkpoint of the folders; left out: the one that `latest` names")
    return parser


def _add_export(command: argparse.ArgumentParser) -> None:
    command.add_argument("dir", type=Path, help=_DIR_HELP)
    command.add_argument(
        "out", type=Path, help="folder to write: of the weights, of one tag (universal), of all tags (stages)"
    )
    command.add_argument("--tag", help="which checkpoint of the folder; left out: the one that `latest` names")
    command.add_argument("--to", choices=FORMS, default="weights", help="what to write (weights)")
    command.add_argument("--dtype", help="weights: fp32 (if left out), bf16, fp16 or stored; stages: precision of the model")
    command.add_argument("--max-shard-size", metavar="SIZE", help="weights: limit of one file, e.g. 500MB (5GB)")
    command.add_argument("--safe-serialization", action="store_true", help="weights: safetensors instead of torch files")
    command.add_argument("--exclude-frozen-parameters", action="store_true", help="weights: leave frozen parameters out")
    command.add_argument("--workers", type=int, help="universal: threads that write (2)")
    command.add_argument("--inject-missing-state", action="store_true", help="universal: see ds_to_universal")
    command.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="stages: ZeRO stage of the job that shall resume")
    command.add_argument("--world-size", type=int, help="stages: its data-parallel ranks")


def _add_place(command: argparse.ArgumentParser) -> None:
    command.add_argument("dir", type=Path, help=_DIR_HELP)
    command.add_argument("--tag", help="which checkpoint of the folder; left out: the one that `latest` names")


def _ls(args: argparse.Namespace) -> Report:
    return list_checkpoints(args.dir)


def _show(args: argparse.Namespace) -> Report:
    return show_checkpoint(find_place(args.dir, args.tag), args.tensors)


def _verify(args: argparse.Namespace) -> Report:
    with _progress("checking") as told:
        return verify(args.dir, args.tag, told)


def _diff(args: argparse.Namespace) -> Report:
    places = find_place(args.a), find_place(args.b)
    with _progress("comparing") as told:
        return diff_checkpoints(
            *places,
            atol=args.atol,
            rtol=args.rtol,
            list_equal=args.all,
            with_state=not args.parameters_only,
            progress=told,
        )


def _export(args: argparse.Namespace) -> Report:
    options = {key: getattr(args, key) for keys in FORMS.values() for key in keys}
    with _progress("writing") as told:
        return export_checkpoint(find_place(args.dir, args.tag), args.out, args.to, options, told)


def _merge(args: argparse.Namespace) -> Report:
    with _progress("copying") as told:
        return merge_folders(args.dirs, args.out, args.tag, told)


@contextmanager
def _progress(doing: str) -> Iterator[Callable[[str], None]]:
    """A line on a terminal that says what is being read; nothing where standard error is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(doing) as status:
        yield lambda text: status.update(f"{doing} {text.replace('[', chr(92) + '[')}")
