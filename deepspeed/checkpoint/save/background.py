r"""Saves that go on while training does: the life of one save on one rank.

    training thread    save(): wait for the save before --> start (describe, copy, agree) --> returns
                                                              \
    a thread per save                                          write, fsync --> commit, agreed over a group of its own
                                                                                   \
    training thread    before_change(): wait for the copy of what updates write <- the next update
    training thread    wait(), the next save(), close() <--------- its error, if there was one

             save()                 the thread ends                 wait(), the next save(), close()
      IDLE ----------> WRITING ------------------------> FINISHED -----------------------------------> IDLE

[Note: at exit] The thread is no daemon: an interpreter that ends, by the script's end, `sys.exit` or an exception, waits for
it first. Functions of `atexit` run after that; a save that one of them makes has no thread that anybody would wait for, so
it is made in the foreground. A killed process leaves the checkpoint before, as with any save.

Does not live here: what a save consists of (`writer`), the copy (`snapshot`). Called by the engine.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from deepspeed.checkpoint.agreement import AsideRanks, Ranks, ranks_of
from deepspeed.checkpoint.disk.storage import Storage
from deepspeed.checkpoint.save.description import Descriptions
from deepspeed.checkpoint.save.node_save import start_on_nodes
from deepspeed.checkpoint.save.nodes import Nodes
from deepspeed.checkpoint.save.piece import Piece
from deepspeed.checkpoint.save.scripts import place_scripts
from deepspeed.checkpoint.save.snapshot import SnapshotMemory
from deepspeed.checkpoint.save.tiers import Tiers
from deepspeed.checkpoint.save.writer import Committed, Content, StartedSave, start_checkpoint
from deepspeed.comm.aside import AsideGroup, new_aside_group
from deepspeed.common.logging import get_logger
from deepspeed.errors import CheckpointError, DeepSpeedError

__all__ = ["SavePlan", "Saver", "StorageOwner"]

_logger = get_logger(__name__)


@dataclass(frozen=True)
class SavePlan:
    """How saves go on."""

    is_background: bool = False
    """Copy the state and write the copy in a thread."""

    waits_at_boundary: bool = False
    """The next accumulation boundary waits for the commit."""

    limit_nbytes: float = math.inf
    """The largest copy on this rank; a larger save is written in the foreground."""

    shows_statistics: bool = False
    """Log bytes and seconds of each save."""

    leaves_scripts: bool = False
    """Put the scripts that turn a checkpoint into plain weights next to `latest` (`scripts`)."""


class StorageOwner(Protocol):
    """Says where bytes go; asked at each save."""

    storage: Storage


class Saver:
    """Writes checkpoints for one engine, one at a time. All ranks make the same calls, from their training thread.

    Attributes:
        owner: whose storage is written to.
    """

    def __init__(
        self,
        plan: SavePlan,
        rank: int,
        world_size: int,
        owner: StorageOwner,
        tiers: Tiers,
        nodes: Nodes | None = None,
    ) -> None:
        """Store the parts; nothing is made before it is needed. With `nodes`, each of them saves to its own disk."""
        self.owner = owner
        self._plan = plan
        self._tiers = tiers
        self._nodes = nodes
        self._commits = rank == 0 if nodes is None else nodes.is_leader(rank)
        self._rank = rank
        self._world_size = world_size
        self._descriptions = Descriptions()
        self._memory = SnapshotMemory(plan.limit_nbytes)
        self._is_memory_prepared = False
        self._aside: AsideGroup | None = None
        self._thread: threading.Thread | None = None
        self._what = ""
        self._copying: StartedSave | None = None
        self._blocked_seconds = 0.0
        self._failure: Exception | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a save goes on in the background at this moment."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, save_dir: Path, tag: str, content: Content, *, save_latest: bool = True) -> StartedSave:
        """Save. Collective. In the background it returns when the caller may compute; else when all is on the disk.

        In the background, private pieces may still be read until `before_change` returns.

        Returns:
            What was saved; `is_held` tells that the rest happens in the background.

        Raises:
            CheckpointError, ArgumentError: on all ranks alike, as `writer.start_checkpoint`; or the save before had failed,
                and nothing of this one was done.
        """
        self.wait()
        began = time.monotonic()
        everybody = ranks_of(self._rank, self._world_size)
        is_background = self._plan.is_background
        can_wait = threading.main_thread().is_alive()  # [Note: at exit]
        finishing = self._ranks_aside() if is_background else everybody
        start = (
            partial(start_checkpoint, descriptions=self._descriptions)
            if self._nodes is None
            else partial(start_on_nodes, nodes=self._nodes)
        )
        started = start(
            save_dir.absolute(),  # the current folder may be another one when the thread comes to it
            tag,
            content,
            everybody,
            hold=self._memory.hold if is_background and can_wait else None,
            check=partial(self._tiers.before_save, save_dir),
            save_latest=save_latest,
            storage=self.owner.storage,
        )
        self._what = f"checkpoint {tag!r} in {save_dir}"
        if not started.is_held:
            if can_wait:
                self._warn_of_limit(started)
            self._finish(started, finishing, began)
            return started
        self._copying = started
        self._blocked_seconds = time.monotonic() - began
        arguments = (started, finishing, began)
        self._thread = threading.Thread(target=self._run, args=arguments, name="deepspeed checkpoint", daemon=False)
        self._thread.start()
        return started

    def before_change(self) -> None:
        """Block until the state that only updates write has been copied: before it is changed or moved. Not collective."""
        copying = self._copying
        if copying is not None:
            began = time.monotonic()
            copying.wait_for_copy()
            self._copying = None  # last: whoever is interrupted here, or asks in another thread, has to wait too
            self._blocked_seconds += time.monotonic() - began

    def wait(self) -> None:
        """Block until no save goes on.

        Raises:
            CheckpointError: the save in the background failed; said once. What was on the disk before it is intact.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = self._copying = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"the background save of {self._what} failed. {failure}") from failure

    def at_boundary(self, pieces: Callable[[], Iterable[Piece]]) -> None:
        """After each update of the weights: wait where the plan says so; the first time, begin to make memory ready.

        Args:
            pieces: gives what a save would write now.

        Raises:
            CheckpointError: as `wait`.
        """
        if self._plan.waits_at_boundary:
            self.wait()
        if self._plan.is_background and not (self._is_memory_prepared or self.is_writing):  # what is written lies in it
            self._is_memory_prepared = True
            self._memory.prepare(pieces())

    def close(self) -> None:
        """Wait, then give memory and connections back.

        Raises:
            CheckpointError: as `wait`.
        """
        try:
            self.wait()
        finally:
            self._memory.release()
            if self._aside is not None:
                self._aside.close()
                self._aside = None
            if self._commits:
                self._tiers.close()

    def _ranks_aside(self) -> Ranks:
        if self._world_size == 1:
            return ranks_of(self._rank, 1)
        if self._aside is None:
            self._aside = new_aside_group()
        return AsideRanks(self._rank, self._aside)

    def _run(self, started: StartedSave, ranks: Ranks, began: float) -> None:
        """Body of the thread. Broad on purpose: what is raised here, `wait` raises."""
        try:
            self._finish(started, ranks, began)
        except Exception as error:
            self._failure = error
            is_foreseen = isinstance(error, DeepSpeedError)  # its text says all
            _logger.error("the background save of %s failed. %s", self._what, error, exc_info=not is_foreseen)

    def _finish(self, started: StartedSave, ranks: Ranks, began: float) -> None:
        committed = started.finish(ranks)
        if not self._commits:
            return
        if self._plan.shows_statistics and self._rank == 0:
            blocked_seconds = self._blocked_seconds if started.is_held else None
            _logger.info("%s", statistics(committed, time.monotonic() - began, blocked_seconds))
        if started.is_kept and committed.folder.is_dir():  # a storage of a client's own may write elsewhere
            if self._plan.leaves_scripts:
                _leave_scripts(started.save_dir)
            self._tiers.after_commit(started.save_dir, started.tag)

    def _warn_of_limit(self, started: StartedSave) -> None:
        if self._plan.is_background and not started.is_held and self._rank == 0:
            _logger.warning(
                "%s is written in the foreground: a copy of what one rank writes (%.3g GB on rank 0) does not fit into "
                "datastates_ckpt.host_cache_size=%.3g GB. Raise it, or leave it out for no limit.",
                self._what,
                started.nbytes / 1e9,
                self._plan.limit_nbytes / 1e9,
            )


def _leave_scripts(save_dir: Path) -> None:
    try:
        place_scripts(save_dir)
    except OSError as error:
        _logger.warning("the checkpoint is whole, but scripts could not be put into %s: %s.", save_dir, error)


def statistics(committed: Committed, seconds: float, blocked_seconds: float | None) -> str:
    """One line about a save: its bytes, seconds and speed, and how long training stood still for it."""
    blocked = "" if blocked_seconds is None else f", training waited {blocked_seconds:.3f} s of it"
    gigabytes = committed.nbytes / 1e9
    return f"saved {committed.folder}: {gigabytes:.3f} GB in {seconds:.3f} s, {gigabytes / seconds:.3f} GB/s{blocked}"
