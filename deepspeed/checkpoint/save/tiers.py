"""Two tiers: checkpoints are saved to a fast disk, and some of them are copied to one that stays (block `nebula`).

    save committed in save_dir ---> Keeper: the fast tier keeps the newest few
         |
         '--> PersistentTier: last copy long enough ago? -- thread: copy, hash, commit, `latest` --> persistent_storage_path

    load: save_dir, then nebula_load_path, then persistent_storage_path: the first that has the checkpoint

The original hands this block to a service of Azure (package `torch_nebula`), which holds the fast tier in the memory of the
nodes, replicates it to other nodes, and uploads to blob storage. Here both tiers are folders: the fast one is `save_dir` (a
local disk, or /dev/shm), the other any mounted file system. A fast tier that outlives its machine, and uploads to storage
that is not mounted, take such a service.

         offer()                    the copy ends, none waits
    IDLE -------> COPYING ----------------------------------> IDLE          a copy that is due meanwhile waits for its turn;
                     ^  |  the copy ends, one waits                         of several only the newest is made
                     '--'

Does not live here: copying (`copying`), what goes (`retention`), when a save is committed (`background`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from deepspeed.checkpoint.disk.names import MANIFEST_FILE, tag_folder
from deepspeed.checkpoint.disk.storage import Storage
from deepspeed.checkpoint.disk.tags import find_tag, read_latest
from deepspeed.checkpoint.save.copying import copy_checkpoint
from deepspeed.checkpoint.save.retention import KeepRules, remove_superseded
from deepspeed.common.logging import get_logger
from deepspeed.config.checkpoint import CheckpointConfig, NebulaConfig
from deepspeed.errors import ArgumentError, CheckpointError, CheckpointNotFoundError

__all__ = ["Keeper", "PersistentTier", "Saved", "Tiers", "choose_load_dir", "load_places", "tiers_of"]

_logger = get_logger(__name__)


class Saved(NamedTuple):
    """A checkpoint that was committed just now."""

    save_dir: Path
    tag: str
    is_latest: bool
    """Whether `latest` names it."""


class PersistentTier:
    """Copies committed checkpoints to another folder, in the background. Used by the rank that commits, and by no other."""

    def __init__(
        self,
        path: Path,
        interval_seconds: float,
        storage: Storage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the parts.

        Args:
            path: folder of all tags of this tier.
            interval_seconds: least time between the beginnings of two copies.
            storage: writes; None for the file system.
            clock: gives seconds.
        """
        self._path = path
        self._interval_seconds = interval_seconds
        self._storage = storage or Storage()
        self._clock = clock
        self._began = -math.inf
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._copying: Saved | None = None
        self._waiting: Saved | None = None
        self._failure: Exception | None = None

    @property
    def tags_in_use(self) -> set[str]:
        """Tags that are being copied, or wait for it: they must stay in the fast tier."""
        with self._guard:
            return {saved.tag for saved in (self._copying, self._waiting) if saved is not None}

    def check_apart(self, save_dir: Path) -> None:
        """See that this tier is another folder than the one saved to, from which older checkpoints are removed.

        Raises:
            ArgumentError: it is the same.
        """
        if save_dir.resolve() == self._path.resolve():
            raise ArgumentError(
                f"save_dir={save_dir} is nebula.persistent_storage_path ({self._path}): older checkpoints of save_dir are "
                "removed, those of the other folder stay. Give two different folders."
            )

    def offer(self, saved: Saved) -> None:
        """Copy a checkpoint in the background if the last copy began long enough ago; returns at once.

        The thread is no daemon: the end of the process waits for it.
        """
        with self._guard:
            now = self._clock()
            if now - self._began < self._interval_seconds:
                return
            self._began = now
            self._waiting = saved
            if self._copying is None:
                self._copying = saved
                self._thread = threading.Thread(target=self._run, name="deepspeed persistent tier", daemon=False)
                self._thread.start()

    def wait(self) -> None:
        """Block until no copy goes on.

        Raises:
            CheckpointError: a copy failed; said once. The fast tier has the checkpoint.
        """
        thread = self._thread
        if thread is not None:
            thread.join()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what a copy failed of, once; does not block.

        Raises:
            CheckpointError: see `wait`.
        """
        with self._guard:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(
                f"a checkpoint was not copied to nebula.persistent_storage_path. {failure} It is whole in the fast tier, "
                "and the next save is copied again."
            ) from failure

    def _run(self) -> None:
        """Body of the thread: copy what waits, until nothing does."""
        while True:
            with self._guard:
                self._copying, self._waiting = self._waiting, None
                if self._copying is None:
                    return
                saved = self._copying
            self._copy(saved)

    def _copy(self, saved: Saved) -> None:
        """Broad on purpose: what is raised here, `raise_failure` raises. After a failed copy another is due at once."""
        source = tag_folder(saved.save_dir, saved.tag)
        before = _manifest_of(source)
        try:
            copied = copy_checkpoint(source, self._path, saved.tag, self._storage, save_latest=saved.is_latest)
            _logger.info("copied %s to %s.", source, copied)
        except Exception as error:
            with self._guard:
                self._began = -math.inf
            if _manifest_of(source) != before:
                _logger.info("%s was saved anew while it was being copied; the next save is copied.", source)
                return
            _logger.exception("%s was not copied to %s", source, self._path)
            with self._guard:
                self._failure = error


@dataclass(frozen=True)
class Keeper:
    """What stays in the folder that is saved to."""

    rules: KeepRules
    storage: Storage = field(default_factory=Storage)

    def apply(self, saved: Saved, in_use: set[str]) -> None:
        """Remove what the rules do not keep, now that `saved` is committed. A tag with a slash is left alone."""
        if "/" not in saved.tag:
            remove_superseded(saved.save_dir, saved.tag, self.rules, self.storage, in_use)


@dataclass(frozen=True)
class Tiers:
    """What happens after each save, on the rank that commits; an object for every engine, whatever its configuration."""

    keeper: Keeper
    persistent: PersistentTier | None = None

    def after_commit(self, save_dir: Path, tag: str) -> None:
        """To be called on rank 0 when a checkpoint is on the disk. Never raises for what the system refuses."""
        saved = Saved(save_dir, tag, is_latest=_is_latest(save_dir, tag))
        in_use: set[str] = set()
        if self.persistent is not None:
            self.persistent.offer(saved)
            in_use = self.persistent.tags_in_use
        self.keeper.apply(saved, in_use)

    def before_save(self, save_dir: Path) -> None:
        """To be called on rank 0 at the start of each save, with the result agreed by all ranks.

        Raises:
            ArgumentError: `save_dir` is the persistent tier too.
            CheckpointError: a copy to the persistent tier had failed.
        """
        if self.persistent is not None:
            self.persistent.check_apart(save_dir)
            self.persistent.raise_failure()

    def close(self) -> None:
        """Wait for the copy that goes on.

        Raises:
            CheckpointError: a copy to the persistent tier failed.
        """
        if self.persistent is not None:
            self.persistent.wait()


def _is_latest(save_dir: Path, tag: str) -> bool:
    try:
        return read_latest(save_dir) == tag
    except CheckpointNotFoundError:  # a load says what is wrong with the file, and retention keeps all
        return False


def _manifest_of(folder: Path) -> bytes | None:
    try:
        return (folder / MANIFEST_FILE).read_bytes()
    except OSError:
        return None


def tiers_of(checkpoint: CheckpointConfig, nebula: NebulaConfig) -> Tiers:
    """What a configuration asks for. With `nebula`, the fast tier keeps `num_of_version_in_retention` unless
    `checkpoint.keep_last` says another number.
    """
    if not nebula.enabled:
        return Tiers(Keeper(KeepRules(checkpoint.keep_last, checkpoint.keep_every)))
    keeper = Keeper(KeepRules(checkpoint.keep_last or nebula.num_of_version_in_retention, checkpoint.keep_every))
    if nebula.persistent_storage_path is None:
        return Tiers(keeper)
    return Tiers(keeper, PersistentTier(Path(nebula.persistent_storage_path), nebula.persistent_time_interval))


def load_places(nebula: NebulaConfig) -> list[Path]:
    """Where a load looks when the folder that it was given lacks the checkpoint, in this order."""
    if not (nebula.enabled and nebula.enable_nebula_load):
        return []
    return [Path(path) for path in (nebula.nebula_load_path, nebula.persistent_storage_path) if path is not None]


def choose_load_dir(load_dir: Path, tag: str | None, others: Sequence[Path]) -> Path:
    """The first folder that has the checkpoint: of `tag`, or else the one that its `latest` names.

    Not collective: rank 0 asks, and tells the others. Without `tag`, a folder without `latest` is passed over, and
    `load_dir` is the answer when none has one.

    Raises:
        CheckpointNotFoundError: `tag`, or what a `latest` names, is in none of the folders, of which there are several.
    """
    misses = []
    for place in (load_dir, *others):
        try:
            wanted = tag if tag is not None else read_latest(place)
            if wanted is None:
                continue
            find_tag(place, wanted, by_latest=tag is None)
        except CheckpointNotFoundError as error:
            misses.append(str(error))
            continue
        if place != load_dir:
            _logger.warning(
                "%s has no checkpoint to load%s; loading from %s.", load_dir, f" of tag {tag!r}" * bool(tag), place
            )
        return place
    if misses and others:
        raise CheckpointNotFoundError("\n".join(misses))
    return load_dir
