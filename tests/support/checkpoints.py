"""Checkpoints without an engine: pieces and states, written at once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deepspeed.checkpoint import Piece
from deepspeed.checkpoint.agreement import ranks_of
from deepspeed.checkpoint.disk.storage import Storage
from deepspeed.checkpoint.save.writer import Content, start_checkpoint

__all__ = ["write_checkpoint"]


def write_checkpoint(
    save_dir: str | os.PathLike[str],
    tag: str,
    pieces: Iterable[Piece],
    state: Mapping[str, Any],
    client_state: Mapping[str, Any],
    *,
    rank: int,
    world_size: int,
    rank_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    group: Any = None,
    storage: Storage | None = None,
) -> Path:
    """Write one checkpoint in the foreground; give its folder. Collective: every rank of `group` (None: all) calls it."""
    content = Content(pieces, lambda: state, lambda: client_state, lambda: rank_state or {})
    ranks = ranks_of(rank, world_size, group)
    started = start_checkpoint(Path(save_dir), tag, content, ranks, save_latest=save_latest, storage=storage)
    return started.finish(ranks).folder
