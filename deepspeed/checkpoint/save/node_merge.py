"""The folders that the nodes of a job wrote to their own disks, as one ordinary checkpoint.

Does not live here: copying and the commit (`copying`). Called by `deepspeed-checkpoint merge`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from deepspeed.checkpoint.disk.manifest import Manifest, NodeEntry
from deepspeed.checkpoint.disk.names import MANIFEST_FILE
from deepspeed.checkpoint.disk.storage import Storage
from deepspeed.checkpoint.save.copying import commit_copy
from deepspeed.common.wording import some
from deepspeed.errors import ArgumentError, CheckpointDamagedError, CheckpointError

__all__ = ["merge_nodes"]


def merge_nodes(
    folders: Sequence[Path],
    target_dir: Path,
    tag: str,
    storage: Storage | None = None,
    progress: Callable[[str], None] = lambda file: None,
) -> Path:
    """Copy the folders of one tag from all nodes into one. Every file is compared with its hash on the way.

    Args:
        folders: the tag's folder of each node, in any order, as far as they can be reached from here.
        target_dir: folder of all tags to write into; `latest` there names the result.
        tag: its name.
        storage: writes; None for the file system.
        progress: told each file before it is copied.

    Returns:
        The new folder.

    Raises:
        ArgumentError: a folder is of another save or no node's; the text names it.
        CheckpointError: a node's folder was not given; the text names the node and its files.
        CheckpointDamagedError: a file differs from what was written.
    """
    manifests = [_manifest(folder) for folder in folders]
    own = [(folder, _node(folder, manifest)) for folder, manifest in zip(folders, manifests, strict=True)]
    first_folder, first = own[0]
    for folder, node in own:
        if node.save != first.save:
            raise ArgumentError(f"{folder} is of another save than {first_folder}. Give the folders of one tag of one save.")
    missing = sorted(set(range(len(first.hosts))) - {node.number for _, node in own})
    places = {file: folder / file for folder, _ in own for file in manifests[0].files if (folder / file).is_file()}
    absent = [file for file in manifests[0].files if file not in places]
    if absent:
        of_nodes = ", ".join(f"{number} ({first.hosts[number]})" for number in missing) or "those given"
        raise CheckpointError(
            f"{len(absent)} of {len(manifests[0].files)} files are in none of the folders: {some(absent, 8)}. They "
            f"were written on node {of_nodes}. Give the folder of every node."
        )
    plain = manifests[0].model_copy(update={"node": None})
    return commit_copy(plain.dump(), places, target_dir, tag, storage or Storage(), save_latest=True, progress=progress)


def _manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST_FILE
    try:
        return Manifest.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}.") from error


def _node(folder: Path, manifest: Manifest) -> NodeEntry:
    if manifest.node is None:
        raise ArgumentError(
            f"{folder} was not saved with checkpoint.use_node_local_storage: it is whole by itself, so there is nothing to "
            "put together."
        )
    return manifest.node
