"""Tags: which there are, which one `latest` names, and whether all ranks mean the same.

What does not live here: what a tag's folder holds (reader) and how it comes to be (folders).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal

from deepspeed.checkpoint.agreement import ranks_of, together
from deepspeed.checkpoint.folders import find_folder
from deepspeed.checkpoint.layouts import layout_of
from deepspeed.checkpoint.names import LATEST_FILE, LATEST_UNIVERSAL_FILE, tag_folder
from deepspeed.common.logging import get_logger
from deepspeed.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["check_tags", "describe_tags", "find_tag", "list_tags", "read_latest", "resolve_tag"]

_logger = get_logger(__name__)


def list_tags(load_dir: str | os.PathLike[str]) -> list[str]:
    """Tags of the checkpoints directly in `load_dir`, of any layout, numbers in them counted (step2 before step10)."""
    folder = Path(load_dir)
    found = [path.name for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []
    return sorted((tag for tag in found if layout_of(folder / tag) is not None), key=_natural)


def describe_tags(load_dir: str | os.PathLike[str]) -> str:
    """The tags of a folder as a sentence for an error text."""
    return f"Tags there: {', '.join(map(repr, list_tags(load_dir))) or 'none'}."


def resolve_tag(
    load_dir: str | os.PathLike[str],
    tag: str | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    group: Any = None,
    prefer_universal: bool = False,
) -> str | None:
    """The tag to load: `tag` itself, else what `latest` names, else None. Collective: rank 0 looks, for all ranks.

    None means that there is no `latest` file; whether that is an error is the caller's business.

    Args:
        load_dir: folder that holds the tags.
        tag: the tag wanted; None for `latest`. Rank 0's counts.
        rank: this rank in `group`.
        world_size: ranks of `group`.
        group: process group of the ranks that load; None for all.
        prefer_universal: without a tag, `latest_universal` goes before `latest`.

    Raises:
        CheckpointNotFoundError: no folder of that tag; the text lists the tags there are.
    """

    def look(_: object) -> str | None:
        wanted = tag if tag is not None else read_latest(Path(load_dir), prefer_universal=prefer_universal)
        if wanted is not None:
            find_tag(Path(load_dir), wanted, by_latest=tag is None)
        return wanted

    found = together(ranks_of(rank, world_size, group), lambda: None, look)
    return None if found is None else str(found)


def read_latest(load_dir: Path, *, prefer_universal: bool = False) -> str | None:
    """The tag in the file `latest`, or, where there is none, in `latest_universal`; None where there is neither.

    `prefer_universal` asks the two in the other order.
    """
    files = (LATEST_FILE, LATEST_UNIVERSAL_FILE)
    for file in reversed(files) if prefer_universal else files:
        try:
            return (load_dir / file).read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            continue
    return None


def find_tag(load_dir: Path, tag: str, *, by_latest: bool = False) -> Path:
    """Folder of `tag`.

    Raises:
        CheckpointNotFoundError: there is none; the text lists the tags there are.
    """
    folder = find_folder(tag_folder(load_dir, tag))
    if folder is None:
        source = f"the file {LATEST_FILE!r} names" if by_latest else "you asked for"
        raise CheckpointNotFoundError(
            f"{load_dir} has no checkpoint {tag!r}, which {source}. {describe_tags(load_dir)} Give one of them as tag, "
            f"or another folder; every rank must see it."
        )
    return folder


def check_tags(tag: str, mode: Literal["Ignore", "Warn", "Fail"], *, rank: int, world_size: int, group: Any = None) -> None:
    """See whether all ranks save under the same tag (`checkpoint.tag_validation`). Collective, unless `mode` is Ignore.

    Args:
        tag: this rank's tag.
        mode: what to do when they differ: nothing, a warning on rank 0 (whose tag is then used), or an error on every rank.
        rank: this rank in `group`.
        world_size: ranks of `group`.
        group: process group of the ranks that save; None for all.

    Raises:
        CheckpointError: mode is Fail and the tags differ; the text says who has which.
    """
    if mode == "Ignore":
        return

    def compare(tags: list[Any]) -> None:
        holders: dict[str, list[int]] = {}
        for holder, held in enumerate(tags):
            holders.setdefault(str(held), []).append(holder)
        if len(holders) == 1:
            return
        listing = "; ".join(f"{held!r} on {_describe(ranks)}" for held, ranks in holders.items())
        text = f"the ranks save under different tags: {listing}. Compute the tag from values that are equal on all ranks."
        if mode == "Fail":
            raise CheckpointError(f'{text} (checkpoint.tag_validation is "Fail")')
        _logger.warning("%s Rank 0's tag %r is used.", text, tags[0])

    together(ranks_of(rank, world_size, group), lambda: tag, compare)


def _describe(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return (
        f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    )


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
