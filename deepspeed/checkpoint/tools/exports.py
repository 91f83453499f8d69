"""`deepspeed-checkpoint export DIR OUT`: a checkpoint of any layout as something that another program reads.

    --to weights     OUT/pytorch_model.bin or model.safetensors    checkpoint.export
    --to universal   OUT/ is the universal folder of one tag       original.writing.to_universal
    --to stages      OUT/<tag>/ holds stage files                  original.writing.to_stages

and `deepspeed-checkpoint merge DIR... OUT`: the folders of several nodes as one checkpoint (`checkpoint.save.node_merge`).

Lives here: which options belong to which form. Does not live here: the writing. Called by `main`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast, get_args

from rich.console import RenderableType

from deepspeed.checkpoint.disk.layouts import layout_of
from deepspeed.checkpoint.export.files import export_weights, parse_dtype
from deepspeed.checkpoint.export.weights_source import open_weights
from deepspeed.checkpoint.original.writing.to_stages import Precision, ZeroStage, write_stages
from deepspeed.checkpoint.original.writing.to_universal import write_universal
from deepspeed.checkpoint.save.node_merge import merge_nodes
from deepspeed.checkpoint.source import CheckpointSource
from deepspeed.checkpoint.tools.facts import files_in
from deepspeed.checkpoint.tools.output import Report, line, nbytes_text, table
from deepspeed.checkpoint.tools.places import Place, find_place, open_place
from deepspeed.errors import ArgumentError

__all__ = ["FORMS", "export_checkpoint", "merge_folders"]

Told = Callable[[str], None]

FORMS: Mapping[str, frozenset[str]] = {
    "weights": frozenset({"dtype", "max_shard_size", "safe_serialization", "exclude_frozen_parameters"}),
    "universal": frozenset({"workers", "inject_missing_state"}),
    "stages": frozenset({"dtype", "stage", "world_size"}),
}
"""Form of the output -> the options that it takes."""

AS_STORED = "stored"


def export_checkpoint(
    place: Place, out: Path, form: str, options: Mapping[str, Any], told: Told = lambda text: None
) -> Report:
    """Write a checkpoint in another form; all its files are compared with their checksums first.

    Args:
        place: which checkpoint.
        out: folder to write; see the module.
        form: one of `FORMS`.
        options: what was given on the command line, None or False for what was not.
        told: told what is being written.

    Raises:
        ArgumentError: an option that the form does not take, or an unusable value.
        CheckpointError, CheckpointDamagedError: see the writers.
    """
    given = {key: value for key, value in options.items() if value is not None and value is not False}
    strangers = sorted(given.keys() - FORMS[form])
    if strangers:
        shown = ", ".join(f"--{key.replace('_', '-')}" for key in strangers)
        raise ArgumentError(f"--to {form} was asked for, which has no use for {shown}. Leave it out.")
    written = {"weights": _weights, "universal": _universal, "stages": _stages}[form](place, out, given, told)
    sizes = {str(path): path.stat().st_size for path in written}
    rows = [(path, nbytes_text(nbytes)) for path, nbytes in sizes.items()]
    record = {"from": str(place.folder), "to": str(out), "form": form, "files": sizes}
    shown_parts: list[RenderableType] = [
        line(f"{place.folder} -> {out}"),
        table("Written", ("file", "size"), rows, right=("size",)),
    ]
    return Report(record, shown_parts)


def _weights(place: Place, out: Path, given: Mapping[str, Any], told: Told) -> list[Path]:
    dtype = given.get("dtype", "fp32")
    return export_weights(
        open_weights(place.load_dir, place.tag),
        out,
        dtype=None if dtype == AS_STORED else parse_dtype(dtype),
        max_shard_size=given.get("max_shard_size", "5GB"),
        safe_serialization=bool(given.get("safe_serialization")),
        exclude_frozen=bool(given.get("exclude_frozen_parameters")),
        progress=lambda file, nbytes: told(file),
    )


def _universal(place: Place, out: Path, given: Mapping[str, Any], told: Told) -> list[Path]:
    write_universal(
        _checked(place, told),
        out,
        workers=given.get("workers", 2),
        inject_missing_state=bool(given.get("inject_missing_state")),
        progress=lambda done, total: told(f"{done} of {total} files"),
    )
    return [out / file for file in files_in(out)]


def _stages(place: Place, out: Path, given: Mapping[str, Any], told: Told) -> list[Path]:
    if "stage" not in given or "world_size" not in given:
        raise ArgumentError("--to stages needs --stage and --world-size: those of the job that shall resume.")
    dtype = given.get("dtype")
    if dtype not in (None, *get_args(Precision)):
        raise ArgumentError(f"--dtype {dtype} is no precision of a model. Give one of {', '.join(get_args(Precision))}.")
    folder = write_stages(
        _checked(place, told),
        out,
        stage=cast("ZeroStage", given["stage"]),
        world_size=given["world_size"],
        dtype=dtype,
        progress=lambda done, total: told(f"{done} of {total} files"),
    )
    return [folder / file for file in files_in(folder)]


def _checked(place: Place, told: Told) -> CheckpointSource:
    told("comparing checksums")
    source = open_place(place)
    source.check_own_share()
    return source


def merge_folders(folders: list[Path], out: Path, tag: str | None, told: Told = lambda text: None) -> Report:
    """Put the folders of one tag from all nodes together into `out`, a folder of tags.

    Raises:
        ArgumentError, CheckpointError, CheckpointDamagedError: see `node_merge.merge_nodes`.
    """
    places = [find_place(folder, None if layout_of(folder) else tag) for folder in folders]
    target = merge_nodes([place.folder for place in places], out, tag or places[0].tag, progress=told)
    sizes = {str(target / file): nbytes for file, nbytes in files_in(target).items()}
    record = {"from": [str(place.folder) for place in places], "to": str(target), "files": sizes}
    rows = [(path, nbytes_text(nbytes)) for path, nbytes in sizes.items()]
    return Report(record, [table("Written", ("file", "size"), rows, right=("size",))])
