"""Going on from the newest whole checkpoint of a folder, without the script's doing (`elasticity.auto_resume`).

    rank 0       what is there? `latest`, then the others, newest first; then the other tiers ---> all ranks
    every rank   load one after the other until one is whole

Does not live here: loading (`loading`), who restarts a job (`launcher`, a scheduler, a person). Called by
`deepspeed.initialize`, before it returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from deepspeed.checkpoint.agreement import ranks_of, together
from deepspeed.checkpoint.disk.tags import read_latest
from deepspeed.checkpoint.save.retention import saved_tags
from deepspeed.checkpoint.save.tiers import load_places
from deepspeed.common.logging import get_logger, log_dist
from deepspeed.errors import CheckpointDamagedError, CheckpointNotFoundError

if TYPE_CHECKING:
    from deepspeed.engine.engine import DeepSpeedEngine

__all__ = ["newest_first", "resume_newest"]

logger = get_logger(__name__)

_Place = tuple[str, str | None]
"""Folder of all tags, and a tag; None for what `latest` names."""


def resume_newest(engine: DeepSpeedEngine, folder: Path) -> None:
    """Load the newest whole checkpoint below `folder` into `engine`, if there is one. Collective over all ranks.

    `engine.resumed_from` and `engine.resumed_client_state` then say what was loaded.

    Raises:
        CheckpointDamagedError: there are checkpoints, and none is whole; the text says what is wrong with each.
        CheckpointError: names or shapes do not fit the model.
    """
    places = _places(engine, folder)
    faults: list[str] = []
    for place, tag in places:
        try:
            loaded, client_state = engine.load_checkpoint(place, tag)
        except (CheckpointDamagedError, CheckpointNotFoundError) as error:
            faults.append(str(error))
            if engine.global_rank == 0:
                logger.warning("auto_resume passes over checkpoint %s of %s: %s", tag or "latest", place, error)
            continue
        if loaded is not None:
            engine.resumed_from, engine.resumed_client_state = loaded, client_state
            log_dist(f"auto_resume: going on from {loaded}, step {engine.global_steps}, {engine.global_samples} samples")
            return
    if faults:
        listed = "\n".join(f"  {fault}" for fault in faults)
        raise CheckpointDamagedError(
            f"elasticity.auto_resume = {folder}: no checkpoint there is whole:\n{listed}\nMend one of them, give another "
            "folder, or remove this one to start at the beginning."
        )
    log_dist(f"auto_resume: no checkpoint in {folder} yet, training starts at its beginning")


def _places(engine: DeepSpeedEngine, folder: Path) -> list[_Place]:
    """What to try, in order, as rank 0 sees it; where each node has its own disk, the nodes choose among themselves."""
    config, mesh = engine._config, engine._parts.mesh
    ranks = ranks_of(mesh.rank, mesh.world_size)
    folders = [folder, *load_places(config.nebula)]

    def look(_: object) -> list[Any]:
        return [list(place) for place in _tags(folders, prefers_universal=config.checkpoint.load_universal)]

    if engine._parts.checkpointing.nodes is not None:
        held = together(ranks, lambda: any(newest_first(folder)), any)
        return [(str(folder), None)] if held else []
    found = cast("Sequence[Sequence[str]]", together(ranks, lambda: None, look))
    return [(place, tag) for place, tag in found]


def _tags(folders: Sequence[Path], *, prefers_universal: bool) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for tag in newest_first(folder, prefers_universal=prefers_universal):
            yield str(folder), tag


def newest_first(folder: Path, *, prefers_universal: bool = False) -> list[str]:
    """Tags of a folder: what `latest` names, then the others of our format, those saved last first.

    After a return to an older step the checkpoints of the abandoned steps are the older ones.
    """
    try:
        latest = read_latest(folder, prefer_universal=prefers_universal)
    except CheckpointNotFoundError as error:
        logger.warning("auto_resume takes the newest folder instead of what `latest` names: %s", error)
        latest = None
    saved = sorted(saved_tags(folder), key=lambda each: (each.saved_at, each.step, each.tag), reverse=True)
    return list(dict.fromkeys([*([latest] if latest is not None else []), *(each.tag for each in saved)]))
