"""Whether all ranks mean the same tag.

Does not live here: which tags there are (`disk.tags`). Called by the engine before a save or a load.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from deepspeed.checkpoint.agreement import ranks_of, together
from deepspeed.checkpoint.disk.tags import find_tag, read_latest
from deepspeed.common.logging import get_logger
from deepspeed.common.wording import some
from deepspeed.errors import CheckpointError

__all__ = ["compare_tags", "resolve_tag"]

_RANKS_SHOWN = 8

_logger = get_logger(__name__)


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


def compare_tags(tags: Sequence[str], mode: Literal["Ignore", "Warn", "Fail"]) -> None:
    """See whether all ranks save under the same tag (`checkpoint.tag_validation`). On rank 0, with every rank's tag.

    Args:
        tags: each rank's.
        mode: what to do when they differ: nothing, a warning (rank 0's tag is then used), or an error.

    Raises:
        CheckpointError: mode is Fail and the tags differ; the text says who has which.
    """
    holders: dict[str, list[int]] = {}
    for holder, held in enumerate(tags):
        holders.setdefault(held, []).append(holder)
    if mode == "Ignore" or len(holders) == 1:
        return
    listing = "; ".join(f"{held!r} on {_describe(ranks)}" for held, ranks in holders.items())
    text = f"the ranks save under different tags: {listing}. Compute the tag from values that are equal on all ranks."
    if mode == "Fail":
        raise CheckpointError(f'{text} (checkpoint.tag_validation is "Fail")')
    _logger.warning("%s Rank 0's tag %r is used.", text, tags[0])


def _describe(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {some([str(rank) for rank in ranks], _RANKS_SHOWN)}"
