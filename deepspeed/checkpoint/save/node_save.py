"""A save in which every node writes to its own disk: all nodes commit, or none does.

    start    every rank    describe pieces ---> rank 0: are all elements written somewhere? ---> everybody
             node leaders  make .<tag>.writing-<token>/ on their disks
    finish   every rank    write its shard, fsync ---> rank 0: all file entries ---> everybody
             node leaders  client_state.json, the node's own manifest.json, fsync
             node leaders  rename           <- one of them fails: those that renamed undo it
             node leaders  remove the old folder, left-overs, `latest`

Each arrow back is one verdict for all ranks. The manifests of all nodes describe the whole checkpoint and list all files,
but each names the fragments on its own disk first (`node_cover`); so ranks that come back to the same nodes find all they
need there, and the folders put together are an ordinary checkpoint (`node_merge`).

[Note: killed between the renames] The old and the new folder of a tag are then both whole, on every node, one under the tag
and one aside. `node_load` takes the one that all nodes have. So nothing that is aside is removed before the next commit.

Does not live here: what is worth saving (the engine), loading (`node_load`). Called by `background` in place of
`writer.start_checkpoint`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import JsonValue

from deepspeed.checkpoint.agreement import Ranks, together
from deepspeed.checkpoint.disk import names, strict_json
from deepspeed.checkpoint.disk.container import bytes_of, dtype_name, dtype_of
from deepspeed.checkpoint.disk.folders import clean, point_latest, settle, swap_in, working_folder
from deepspeed.checkpoint.disk.manifest import FileEntry, Manifest, NodeEntry, version_for
from deepspeed.checkpoint.disk.storage import Storage
from deepspeed.checkpoint.save.description import Described, Descriptions
from deepspeed.checkpoint.save.node_cover import Joined, Written, entries_for, join
from deepspeed.checkpoint.save.nodes import Nodes
from deepspeed.checkpoint.save.piece import Piece
from deepspeed.checkpoint.save.writer import Committed, Content, Hold, StartedSave
from deepspeed.common.deferred import loaded
from deepspeed.errors import CheckpointError
from deepspeed.version import version

__all__ = ["start_on_nodes"]

_REPEATED = ("state/", "client_state/")
"""Tensors that rank 0 holds alone and every node's disk shall have."""


def start_on_nodes(
    save_dir: Path,
    tag: str,
    content: Content,
    ranks: Ranks,
    *,
    nodes: Nodes,
    hold: Hold | None = None,
    check: Callable[[], None] = lambda: None,
    save_latest: bool = True,
    storage: Storage | None = None,
) -> StartedSave:
    """As `writer.start_checkpoint`, for disks that only the ranks of one node see. Collective over `ranks`.

    Pieces may overlap between nodes; over all ranks they cover each tensor, and what the ranks of a node load they write too
    (`nodes.NodeShares`).

    Raises:
        CheckpointError, ArgumentError: on all ranks alike; what was there is intact on every node.
    """
    save = _NodeSave(save_dir, tag, ranks.rank, storage or Storage(), save_latest, nodes)
    try:
        verdict = together(ranks, lambda: save.describe(content, hold, check), save.join)
        save.take_over(cast("dict[str, Any]", verdict))
        together(ranks, save.make_folder)
    except BaseException:
        save.close()
        raise
    return save


class _NodeSave(StartedSave):
    """One save on one rank. The methods run in the order in which they stand here; `join` on rank 0 only."""

    def __init__(self, save_dir: Path, tag: str, rank: int, storage: Storage, save_latest: bool, nodes: Nodes) -> None:
        super().__init__(save_dir, tag, rank, storage, save_latest, Descriptions())  # each node's: said anew in each save
        self._nodes = nodes
        self._is_leader = nodes.is_leader(rank)
        self._joined: dict[str, Joined] = {}
        self._final = Path()
        self._old: Path | None = None
        self._is_swapped = False

    def join(self, reports: list[JsonValue]) -> JsonValue:
        """On rank 0: see that all elements are written somewhere, and collect what every node must know."""
        names.new_tag_folder(self.save_dir, self.tag)
        described = self._take_reports(reports)
        joined = join([cast("Any", report["pieces"]) for report in described])
        repeated = [piece for piece in self._pieces if piece.name.startswith(_REPEATED)]
        return {
            "tag": self.tag,
            "token": self._token,
            "is_held": all(bool(report["is_held"]) for report in described),
            "state": self._state,
            "client_state": self._client_state,
            "tensors": {piece.name: _packed(loaded(piece.data)) for piece in repeated},
            "joined": cast(
                "JsonValue", {n: [list(each.tensor), list(map(list, each.written))] for n, each in joined.items()}
            ),
        }

    def take_over(self, verdict: Mapping[str, Any]) -> None:
        """Know what rank 0 found; leaders of nodes write its state's tensors too. Waits for the copy of the own pieces."""
        if self._held is not None:
            self._held.wait_shared()
        self.tag, self._token, self.is_held = verdict["tag"], verdict["token"], verdict["is_held"]
        self._state, self._client_state = verdict["state"], verdict["client_state"]
        self._world_size = len(self._nodes.node_of)
        self._joined = {
            name: Joined(Described(*tensor), [Written(*each) for each in written])
            for name, (tensor, written) in verdict["joined"].items()
        }
        for name, packed in verdict["tensors"].items():
            tensor = _unpacked(*packed)
            for node in range(1, len(self._nodes.hosts)):
                self._joined[name].written.append(Written(self._nodes.leader(node), 0, tensor.numel()))
            if self._is_leader and self._rank != 0:
                self._pieces = [*self._pieces, Piece.whole(name, tensor)]
        self._final = names.tag_folder(self.save_dir, self.tag)
        self._working_name = str(working_folder(self._final, self._token).relative_to(self.save_dir))

    def make_folder(self) -> None:
        """On each leader: make the folder of its node."""
        if self._is_leader:
            working = self.save_dir / self._working_name
            try:
                self._storage.make_folder(working)
                self._working = working
                self._lock = self._storage.lock(working)
            except OSError as error:
                raise CheckpointError(f"{self._where()}: could not make {working}: {error}.") from error

    def finish(self, ranks: Ranks) -> Committed:
        """Write and commit on every node. Collective over `ranks`; see `StartedSave.finish`."""
        try:
            verdict = together(ranks, self._write_own, self._all_files)
            files = {file: FileEntry.model_validate(entry) for file, entry in cast("dict[str, Any]", verdict).items()}
            saved_at = datetime.now(timezone.utc).isoformat(timespec="microseconds")
            sizes = cast("list[int]", together(ranks, lambda: self._describe_node(files, saved_at), lambda sizes: sizes))
            self._swap_on_all(ranks)
            together(ranks, self._settle)
        finally:
            self.close()
        return Committed(self._final, sum(sizes) + sum(entry.nbytes for entry in files.values()))

    def _write_own(self) -> JsonValue:
        try:
            return self.write_shard()
        except CheckpointError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            leader = self._nodes.leader(self._nodes.node_of[self._rank])
            raise CheckpointError(
                f"{self._where()}: {self.save_dir / self._working_name}, which rank {leader} made, is not there. All ranks "
                "of a node must see the same save_dir; on a node without a disk of its own leave out "
                "checkpoint.use_node_local_storage."
            ) from error

    def _all_files(self, shards: list[JsonValue]) -> JsonValue:
        return {names.shard_file(rank): shard for rank, shard in enumerate(shards) if shard}

    def _describe_node(self, shards: dict[str, FileEntry], saved_at: str) -> JsonValue:
        """On each leader: write what describes the shards; give its bytes."""
        if self._working is None:
            return 0
        try:
            text = strict_json.dumps(self._client_state, indent=1).encode()
            client_state = self._storage.write_file(self._working / names.CLIENT_STATE_FILE, text)
            manifest = self._node_manifest({names.CLIENT_STATE_FILE: client_state, **shards}, saved_at)
            written = self._storage.write_file(self._working / names.MANIFEST_FILE, manifest.dump())
            self._storage.sync_folder(self._working)
        except OSError as error:
            raise CheckpointError(
                f"{self._where()}: could not write what describes checkpoint {self.tag!r}: {error}. Any earlier checkpoint "
                "is intact on every node. Correct the cause and save again."
            ) from error
        return client_state.nbytes + written.nbytes

    def _node_manifest(self, files: dict[str, FileEntry], saved_at: str) -> Manifest:
        node = self._nodes.node_of[self._rank]
        tensors = entries_for(self._joined, frozenset(self._nodes.ranks_beside(self._rank)))
        return Manifest(
            format="deepspeed-checkpoint",
            version=version_for(tensors),
            library=version,
            saved_at=saved_at,
            world_size=self._world_size,
            files=files,
            tensors=tensors,
            state=self._state,
            node=NodeEntry(
                save=self._token, number=node, hosts=list(self._nodes.hosts), node_of_ranks=list(self._nodes.node_of)
            ),
        )

    def _swap_on_all(self, ranks: Ranks) -> None:
        """Make the finished folder the checkpoint on every node, or on none."""
        try:
            together(ranks, self._swap)
        except CheckpointError:
            together(ranks, self._swap_back)
            raise

    def _swap(self) -> None:
        if self._working is not None:
            try:
                self._old = swap_in(self._working, self._final, self._token, self._storage)
                self._is_swapped = True
            except OSError as error:
                raise CheckpointError(
                    f"{self._where()}: could not rename the finished folder to {self._final.name}: {error}. Any earlier "
                    "checkpoint is intact on every node."
                ) from error

    def _swap_back(self) -> None:
        """Put back what stood there before; the new folder is then unfinished again, and `close` removes it."""
        if not self._is_swapped:
            return
        assert self._working is not None  # it was swapped in
        try:
            if self._old is None:
                self._storage.rename(self._final, self._working)
            elif not self._storage.exchange(self._final, self._old):
                self._storage.rename(self._final, self._working)
                self._storage.rename(self._old, self._final)
        except OSError as error:
            self._working = None  # leave both where they are: a load takes the one that all nodes have
            raise CheckpointError(f"{self._where()}: could not undo the rename of {self._final.name}: {error}.") from error

    def _settle(self) -> None:
        """On each leader, once all have renamed."""
        if not self._is_leader:
            return
        self._working = None  # committed: from here on, errors leave the new checkpoint whole
        try:
            settle(self._old, self._final, self._storage)
            if self._save_latest:
                point_latest(self.save_dir, self.tag, self._token, self._storage)
            for parent in {self.save_dir, self._final.parent}:  # [Note: killed between the renames]
                clean(parent, self._storage)
        except OSError as error:
            raise CheckpointError(
                f"{self._where()}: the new checkpoint {self.tag!r} is whole on every node, but could not be made durable or "
                f"the latest: {error}."
            ) from error

    def _where(self) -> str:
        return f"{self._nodes.describe(self._nodes.node_of[self._rank])}, {self.save_dir}"


def _packed(tensor: torch.Tensor) -> JsonValue:
    """A small tensor as JSON."""
    data = base64.b64encode(bytes_of(tensor)).decode()
    return [dtype_name(tensor.dtype, "a tensor of the state"), list(tensor.shape), data]


def _unpacked(dtype: str, shape: list[int], data: str) -> torch.Tensor:
    raw = bytearray(base64.b64decode(data))
    found = dtype_of(dtype, "a tensor of the state")
    return (torch.frombuffer(raw, dtype=found) if raw else torch.empty(0, dtype=found)).view(shape)
