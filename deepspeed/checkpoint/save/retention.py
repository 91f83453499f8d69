"""Which older checkpoints go when a new one is on the disk, and how they go.

    save committed ---> what is there (tag, time, step) ---> superseded(): a pure decision ---> renamed aside, then removed

Never removed: the checkpoint just saved, the one that `latest` names, checkpoints of other layouts, and folders in which
there are files of the user. So a checkpoint is kept for good by putting any file of one's own into its folder.

[Note: aside first] A folder is renamed to the name of an unfinished save before its files go. A kill at any moment leaves a
whole checkpoint under the tag, or none; the rest is removed by the next save like any left-over.

Does not live here: when a save is committed (`background`). Called by `tiers`, on the rank that committed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from deepspeed.checkpoint.disk import strict_json
from deepspeed.checkpoint.disk.folders import new_token, working_folder
from deepspeed.checkpoint.disk.names import LATEST_FILE, LATEST_UNIVERSAL_FILE, MANIFEST_FILE, is_own_file
from deepspeed.checkpoint.disk.storage import Storage
from deepspeed.checkpoint.disk.tags import read_tag_file
from deepspeed.common.logging import get_logger
from deepspeed.errors import CheckpointNotFoundError

__all__ = ["KeepRules", "SavedTag", "remove_superseded", "saved_tags", "superseded"]

_logger = get_logger(__name__)


class SavedTag(NamedTuple):
    """One checkpoint that is there."""

    tag: str
    saved_at: str
    """ISO 8601 in UTC: as text in the order of time."""

    step: int


@dataclass(frozen=True)
class KeepRules:
    """Which checkpoints of a folder stay."""

    last: int | None = None
    """The newest so many; None: all, or where `every` is given, one."""

    every: int | None = None
    """Besides them, of each so many steps the first checkpoint; None: no others."""


def superseded(saved: Sequence[SavedTag], rules: KeepRules, protected: Collection[str] = ()) -> list[str]:
    """The tags that may go, oldest first.

    Age is the time of the save, not the step: after a return to an older step, the checkpoints of the abandoned steps are
    the older ones.

    Args:
        saved: the checkpoints that are there, in any order.
        rules: which stay.
        protected: tags that stay whatever the rules say; they count among the newest where they are.
    """
    if rules.last is None and rules.every is None:
        return []
    by_age = sorted(saved, key=lambda each: (each.saved_at, each.step, each.tag))
    kept = {each.tag for each in by_age[-(rules.last or 1) :]} | set(protected)
    if rules.every is not None:
        kept |= _milestones(by_age, rules.every)
    return [each.tag for each in by_age if each.tag not in kept]


def _milestones(saved: Sequence[SavedTag], every: int) -> set[str]:
    """Of each `every` steps the checkpoint of the lowest step, and of several of that step the newest; none before the first
    `every` steps are done.
    """
    first: dict[int, SavedTag] = {}
    for each in saved:
        period = each.step // every
        if period > 0 and (period not in first or each.step <= first[period].step):
            first[period] = each
    return {each.tag for each in first.values()}


def saved_tags(save_dir: Path) -> list[SavedTag]:
    """The checkpoints of our format directly in a folder. One whose manifest cannot be read is left out, so it stays."""
    found = []
    for path in save_dir.glob(f"*/{MANIFEST_FILE}"):
        if path.parent.name.startswith(".") or path.parent.is_symlink():
            continue
        try:
            found.append(_saved_tag(path))
        except (OSError, ValueError) as error:
            _logger.warning("%s cannot be read (%s), so its checkpoint is passed over. Remove it by hand.", path, error)
    return found


def _saved_tag(path: Path) -> SavedTag:
    """What the manifest at `path` says; its checksum is the reader's business."""
    manifest = strict_json.loads(path.read_bytes())
    if not isinstance(manifest, dict) or "saved_at" not in manifest:
        raise ValueError("it holds no time")
    state = manifest.get("state")
    step = state.get("global_steps") if isinstance(state, dict) else None
    return SavedTag(path.parent.name, str(manifest["saved_at"]), step if isinstance(step, int) else 0)


def remove_superseded(
    save_dir: Path, just_saved: str, rules: KeepRules, storage: Storage, protected: Collection[str] = ()
) -> list[str]:
    """Remove what the rules do not keep. Never raises for what the system refuses: the new checkpoint is whole all the same.

    Args:
        save_dir: folder of the tags.
        just_saved: the tag that was committed just now.
        rules: which stay.
        storage: does the work.
        protected: tags that are in use elsewhere, such as those being copied to another tier.

    Returns:
        The tags that are gone.
    """
    if rules.last is None and rules.every is None:
        return []
    try:
        named = {read_tag_file(save_dir / file) for file in (LATEST_FILE, LATEST_UNIVERSAL_FILE)}
    except CheckpointNotFoundError as error:
        _logger.warning("no checkpoint is removed, as it is not known which one is the latest. %s", error)
        return []
    kept = {just_saved, *protected, *(tag for tag in named if tag is not None)}
    return [tag for tag in superseded(saved_tags(save_dir), rules, kept) if _remove(save_dir / tag, storage)]


def _remove(folder: Path, storage: Storage) -> bool:
    """Remove one checkpoint, see [Note: aside first]; whether it is gone."""
    try:
        mine = sorted(entry.name for entry in folder.iterdir() if not is_own_file(entry.name))
        if mine:
            _logger.info("keeping %s: it holds %s, which is not the checkpoint's.", folder, ", ".join(mine))
            return False
        lock = storage.lock(folder)
        if lock is None:
            return False
        try:
            aside = working_folder(folder, new_token())
            storage.rename(folder, aside)
            storage.remove(aside)
        finally:
            lock.release()
    except OSError as error:
        _logger.warning("could not remove the superseded checkpoint %s: %s. The next save tries again.", folder, error)
        return False
    _logger.info("removed %s: checkpoint.keep_last and keep_every do not keep it.", folder)
    return True
