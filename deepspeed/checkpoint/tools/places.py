"""Which checkpoint a path on the command line means.

    runs/a             with `latest` or tags in it: the folder of all tags
    runs/a/step100     one tag's folder

Lives here: that choice, and opening one. Does not live here: reading. Called by the commands of this folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from deepspeed.checkpoint.agreement import Alone
from deepspeed.checkpoint.disk.layouts import layout_of
from deepspeed.checkpoint.disk.names import LATEST_FILE, LATEST_UNIVERSAL_FILE
from deepspeed.checkpoint.disk.tags import describe_tags, find_tag, list_tags, read_latest
from deepspeed.checkpoint.opening import open_folder
from deepspeed.checkpoint.reader import CheckpointReader
from deepspeed.checkpoint.save.node_load import NodeReader
from deepspeed.checkpoint.source import CheckpointSource
from deepspeed.errors import ArgumentError, CheckpointNotFoundError

__all__ = ["Place", "all_tags", "find_place", "latest_files", "open_place"]


class Place(NamedTuple):
    """One checkpoint on the disk."""

    load_dir: Path
    tag: str
    folder: Path


def find_place(path: Path, tag: str | None = None) -> Place:
    """The checkpoint that `path` means: a tag's own folder, or in a folder of tags `tag`, else what `latest` names.

    Raises:
        ArgumentError: there is no such folder, or a tag was given for a tag's own folder.
        CheckpointNotFoundError: no checkpoint of that tag; the text lists the tags there are.
    """
    if not path.is_dir():
        raise ArgumentError(f"{path} is no folder. Give the folder of all tags, or that of one tag.")
    if layout_of(path) is not None:
        if tag is not None:
            raise ArgumentError(f"{path} is itself a checkpoint, so --tag {tag} has no meaning. Leave it out.")
        resolved = path.resolve()
        return Place(resolved.parent, resolved.name, path)
    wanted = tag if tag is not None else read_latest(path)
    if wanted is None:
        raise CheckpointNotFoundError(
            f"{path} has no file {LATEST_FILE!r}. {describe_tags(path)} Give one of them with --tag, or its folder."
        )
    return Place(path, wanted, find_tag(path, wanted, by_latest=tag is None))


def open_place(place: Place) -> CheckpointSource:
    """Open it, without comparing checksums.

    Raises:
        CheckpointError, CheckpointDamagedError, CheckpointNotFoundError: see `opening.open_folder`.
    """
    source = open_folder(place.folder, place.tag, Alone())
    if isinstance(source, CheckpointReader) and source.manifest.node is not None:
        return NodeReader(place.folder, place.tag, Alone(), local_rank=0, local_world_size=1)
    return source


def latest_files(load_dir: Path) -> dict[str, str]:
    """`latest` and `latest_universal`, as far as they are there -> the tag that each names."""
    return {
        file: (load_dir / file).read_text(encoding="utf-8", errors="replace").strip()
        for file in (LATEST_FILE, LATEST_UNIVERSAL_FILE)
        if (load_dir / file).is_file()
    }


def all_tags(load_dir: Path) -> list[str]:
    """The tags directly in a folder, and others that `latest` names: further down, or set aside by a killed save."""
    direct = list_tags(load_dir)
    return direct + sorted(
        {tag for tag in latest_files(load_dir).values() if tag not in direct and _is_there(load_dir, tag)}
    )


def _is_there(load_dir: Path, tag: str) -> bool:
    try:
        return layout_of(find_tag(load_dir, tag)) is not None
    except (ArgumentError, CheckpointNotFoundError):
        return False
