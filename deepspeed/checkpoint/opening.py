"""Opening a checkpoint, whatever its layout: all ranks agree on the folder, check the files, and get a source each.

    rank 0       which folder? (tag, or `latest`) ---> all ranks
    every rank   open it, check its share of the files ---> one verdict: nothing is read from a damaged checkpoint

Does not live here: which folders there are (`disk.tags`), what a layout looks like (`disk.layouts`), reading (the sources).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

from deepspeed.checkpoint.agreement import Ranks, ranks_of, together
from deepspeed.checkpoint.disk.layouts import Layout, layout_of
from deepspeed.checkpoint.disk.names import LATEST_FILE
from deepspeed.checkpoint.disk.tags import find_tag, hint_for, read_latest
from deepspeed.checkpoint.original.reading.stages import StageSource
from deepspeed.checkpoint.original.reading.universal import UniversalSource
from deepspeed.checkpoint.reader import CheckpointReader
from deepspeed.checkpoint.source import CheckpointSource
from deepspeed.errors import CheckpointNotFoundError

__all__ = ["open_checkpoint", "open_folder"]


def open_checkpoint(
    load_dir: str | os.PathLike[str],
    tag: str | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    group: Any = None,
    verify: bool = True,
    prefer_universal: bool = False,
) -> CheckpointSource:
    """Open one checkpoint. Collective: every rank of `group` calls it and opens the folder that rank 0 finds.

    Args:
        load_dir: folder that holds the tags, seen by all ranks.
        tag: which checkpoint; None for the one that `latest` names.
        rank: this rank in `group`.
        world_size: ranks of `group`.
        group: process group of the ranks that load; None for all.
        verify: compare every file with its checksum first, each rank a share of them.
        prefer_universal: without a tag, `latest_universal` goes before `latest`.

    Raises:
        CheckpointNotFoundError: no such checkpoint; the text lists the tags there are.
        CheckpointDamagedError: a file is missing, cut short or changed; the text names each.
        CheckpointError: written by a newer version of the format, or a class that is not plain data is in it.
    """
    ranks = ranks_of(rank, world_size, group)

    def find(_: object) -> list[Any]:
        wanted = tag if tag is not None else read_latest(Path(load_dir), prefer_universal=prefer_universal)
        if wanted is None:
            raise CheckpointNotFoundError(
                f"{load_dir} has no file {LATEST_FILE!r}, so a tag is needed. {hint_for(load_dir)}"
            )
        return [wanted, str(find_tag(Path(load_dir), wanted, by_latest=tag is None).relative_to(load_dir))]

    found_tag, folder = cast("tuple[str, str]", together(ranks, lambda: None, find))
    source: list[CheckpointSource] = []

    def look() -> None:
        source.append(open_folder(Path(load_dir, folder), found_tag, ranks))
        if verify:
            source[0].check_own_share()

    together(ranks, look)
    return source[0]


def open_folder(folder: Path, tag: str, ranks: Ranks) -> CheckpointSource:
    """Open the folder of one tag. Not collective: `ranks` only says which share of the files this rank checks.

    Raises:
        CheckpointNotFoundError: the folder holds no checkpoint of a known layout.
        CheckpointError, CheckpointDamagedError: see `open_checkpoint`.
    """
    layout = layout_of(folder)
    if layout is Layout.OURS:
        return CheckpointReader(folder, tag, ranks)
    if layout is Layout.UNIVERSAL:
        return UniversalSource(folder, tag, ranks)
    if layout is Layout.STAGES:
        return StageSource(folder, tag, ranks)
    raise CheckpointNotFoundError(
        f"{folder} holds no checkpoint of a known layout: no manifest.json and no *_model_states.pt, so it is half-written, "
        f"damaged or of another program. {hint_for(folder.parent)}"
    )
