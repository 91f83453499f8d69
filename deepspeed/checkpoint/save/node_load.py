"""Opening a checkpoint that every node has a part of on its own disk.

    node leaders  what does `latest` name, and which whole folders of that tag are here? ---> rank 0: the one all nodes have
    every rank    open the node's folder, check its share of the files that are here ---> one verdict
    every rank    .read(...): from the own disk; an element that is not here is an error that says on which node it is

Does not live here: reading (`reader`), writing (`node_save`), putting folders together (`node_merge`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, cast

import xxhash

from deepspeed.checkpoint.agreement import Ranks, together
from deepspeed.checkpoint.disk import names, strict_json
from deepspeed.checkpoint.disk.file_check import check_runs, share_blocks
from deepspeed.checkpoint.disk.folders import set_aside
from deepspeed.checkpoint.disk.manifest import NodeEntry, parts_of
from deepspeed.checkpoint.disk.tags import describe_tags, read_latest
from deepspeed.checkpoint.reader import CheckpointReader
from deepspeed.checkpoint.save.nodes import Nodes
from deepspeed.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["NodeReader", "open_on_nodes"]

_FILES_SHOWN = 4


class _Candidate(NamedTuple):
    """One whole folder of a tag on one node."""

    save: str
    """Of which save: equal on all nodes."""

    folder: str
    """Relative to the folder of all tags."""

    is_committed: bool
    saved_at: str


def open_on_nodes(load_dir: Path, tag: str | None, ranks: Ranks, nodes: Nodes, *, verify: bool = True) -> NodeReader | None:
    """Open a checkpoint of which each node reads its own folder. Collective over `ranks`.

    Args:
        load_dir: folder of all tags on this rank's node.
        tag: which checkpoint; None for the newest that a `latest` names on any node and that all nodes have.
        ranks: those that load.
        nodes: where they run.
        verify: compare the files that are here with their hashes.

    Returns:
        The checkpoint, or None where no tag is given and no node has a `latest`.

    Raises:
        CheckpointNotFoundError: not on all nodes; the text says what is where.
        CheckpointDamagedError: a file that is here is missing, cut short or changed; the text names each.
    """
    is_leader = nodes.is_leader(ranks.rank)

    def wanted(latest: list[Any]) -> Any:
        named = [tag] if tag is not None else [name for name in latest if name is not None]
        return list(dict.fromkeys(named))

    tags = cast("list[str]", together(ranks, lambda: read_latest(load_dir) if is_leader else None, wanted))
    if not tags:
        return None

    def choose(reports: list[Any]) -> Any:
        return _choose(tags, [reports[nodes.leader(node)] for node in range(len(nodes.hosts))], nodes)

    here = together(ranks, lambda: _look(load_dir, tags) if is_leader else None, choose)
    found, folders = cast("tuple[str, list[str]]", here)
    opened: list[NodeReader] = []

    def look() -> None:
        folder = load_dir / folders[nodes.node_of[ranks.rank]]
        beside = nodes.ranks_beside(ranks.rank)
        opened.append(NodeReader(folder, found, ranks, beside.index(ranks.rank), len(beside)))
        if verify:
            opened[0].check_own_share()

    together(ranks, look)
    return opened[0]


class NodeReader(CheckpointReader):
    """The part of a checkpoint that is on this node, as a `CheckpointSource`."""

    def __init__(self, folder: Path, tag: str, ranks: Ranks, local_rank: int, local_world_size: int) -> None:
        super().__init__(folder, tag, ranks)
        self._local_rank = local_rank
        self._local_world_size = local_world_size
        self._absent = {file for file in self.manifest.files if self._is_elsewhere(file)}

    def check_own_share(self) -> None:
        """Compare this rank's share of the files that are on this node with the manifest.

        Raises:
            CheckpointDamagedError: naming each.
        """
        files = {file: entry for file, entry in self.manifest.files.items() if file not in self._absent}
        check_runs(self.folder, files, share_blocks(files, self._local_world_size)[self._local_rank])

    def rank_state(self, rank: int) -> dict[str, Any]:
        """What `rank` of the writing job stored for itself.

        Raises:
            CheckpointError: it is on another node.
        """
        self._refuse_absent({names.shard_file(rank)}, f"the state of rank {rank}")
        return super().rank_state(rank)

    def _read_bytes(self, name: str, start: int, into: memoryview) -> None:
        """Refuse what is on another node.

        Raises:
            CheckpointError: it is.
        """
        if self._absent:
            count = len(into) // self.dtype(name).itemsize
            needed = {part.file for part in parts_of(self.manifest.tensors[name].fragments, start, count)}
            self._refuse_absent(needed, name)
        super()._read_bytes(name, start, into)

    def _is_elsewhere(self, file: str) -> bool:
        """Whether a file was written on another node and has not been copied here."""
        node = self.manifest.node
        return node is not None and node.home_of(file) not in (None, node.number) and not (self.folder / file).exists()

    def _refuse_absent(self, files: set[str], what: str) -> None:
        missing = sorted(files & self._absent)
        if not missing:
            return
        node = self.manifest.node
        assert node is not None  # only then is a file elsewhere
        raise CheckpointError(_absence(self.folder, node, missing, what))


def _absence(folder: Path, node: NodeEntry, missing: list[str], what: str) -> str:
    """What is said when something is needed that another node's disk holds."""
    homes: dict[int, list[str]] = {}
    for file in missing:
        homes.setdefault(node.home_of(file) or 0, []).append(file)
    lines = [
        f"{', '.join(files[:_FILES_SHOWN])}{' ...' * (len(files) > _FILES_SHOWN)} on node {home} ({node.hosts[home]})"
        for home, files in homes.items()
    ]
    return (
        f"{what!r} is needed here, but {folder} holds only the files of node {node.number} ({node.hosts[node.number]}); it "
        f"is in {'; '.join(lines)}, in the folder of the same path. The checkpoint was saved with "
        f"checkpoint.use_node_local_storage by {len(node.node_of_ranks)} ranks on {len(node.hosts)} nodes. Resume with the "
        "same ranks on the same nodes and the same ZeRO stage, or put the nodes' folders together with "
        "`deepspeed-checkpoint merge` and load the result."
    )


def _look(load_dir: Path, tags: list[str]) -> Any:
    """The whole folders of each tag on this node, and the tags there are."""
    return {"tags": describe_tags(load_dir), "found": {tag: _candidates(load_dir, tag) for tag in tags}}


def _candidates(load_dir: Path, tag: str) -> list[list[Any]]:
    """Folders with a manifest: the committed one, and those that a kill between the nodes' renames left aside."""
    final = names.tag_folder(load_dir, tag)
    folders = [(final, True), *((aside.path, False) for aside in set_aside(final.parent) if aside.final == final)]
    found = []
    for folder, is_committed in folders:
        try:
            raw = (folder / names.MANIFEST_FILE).read_bytes()
            fields = strict_json.loads(raw)
        except (OSError, ValueError):
            continue
        if isinstance(fields, dict):
            node = fields.get("node")
            save = str(node["save"]) if isinstance(node, dict) else xxhash.xxh3_128_hexdigest(raw)
            found.append([save, str(folder.relative_to(load_dir)), is_committed, str(fields.get("saved_at"))])
    return found


def _choose(tags: list[str], reports: list[Any], nodes: Nodes) -> Any:
    """The tag and each node's folder of the newest save that all nodes have and that was committed on one of them at least.

    Raises:
        CheckpointNotFoundError: there is none.
    """
    choices: list[tuple[str, str, list[str]]] = []
    for tag in tags:
        of_nodes = [[_Candidate(*each) for each in report["found"][tag]] for report in reports]
        for save in {each.save for found in of_nodes for each in found if each.is_committed}:
            same = [next((each for each in found if each.save == save), None) for found in of_nodes]
            whole = [each for each in same if each is not None]
            if len(whole) == len(same):
                choices.append((whole[0].saved_at, tag, [each.folder for each in whole]))
    if choices:
        _, tag, folders = max(choices)
        return [tag, folders]
    wanted = " or ".join(map(repr, tags))
    where = "; ".join(f"{nodes.describe(node)}: {report['tags']}" for node, report in enumerate(reports))
    raise CheckpointNotFoundError(
        f"no checkpoint {wanted} is on every node (checkpoint.use_node_local_storage). {where} Give a tag that all nodes "
        "have, start on the nodes that saved it, or put the nodes' folders together with `deepspeed-checkpoint merge`."
    )
