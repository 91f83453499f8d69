"""What is on disk, and how to write and read it. This room knows files, names and ranks, not models or optimizers.

    save_dir/
      latest                      text: the tag that a load without a tag takes
      <tag>/
        manifest.json             what there is: tensors, fragments, files and their hashes, state; guarded by a checksum
        client_state.json         the user's state; its tensors lie in the first rank's shard
        rank_00000.safetensors    what rank 0 wrote, and its `rank_state`
        rank_00001.safetensors    ...

Tensors are described globally (name, shape, dtype) and stored as fragments of their flattened form, so any rank of any
later job asks for the range it needs, whoever wrote it. There is no pickle anywhere.
The page `docs/reference/checkpoint-format.md` describes every field; `docs/adr/0003-checkpoint-format.md` says why.

    engine --- Piece --> writer.write_checkpoint --> container, client_state, manifest --> folders (commit), storage (bytes)
    engine <-- tensors - opening.open_checkpoint <-- reader | original.stages | original.universal <-- tags (which folder)
                             every decision by `agreement.together`: all ranks go on, or all raise the same error
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.common.lazy import attach

if TYPE_CHECKING:  # what type checkers see; a test holds it equal to _NAMES
    from deepspeed.checkpoint.disk.client_state import UnstorableStateError as UnstorableStateError
    from deepspeed.checkpoint.disk.client_state import decode_client_state as decode_client_state
    from deepspeed.checkpoint.disk.client_state import encode_client_state as encode_client_state
    from deepspeed.checkpoint.disk.manifest import Manifest as Manifest
    from deepspeed.checkpoint.disk.tags import list_tags as list_tags
    from deepspeed.checkpoint.moments import read_optimizer_state as read_optimizer_state
    from deepspeed.checkpoint.opening import open_checkpoint as open_checkpoint
    from deepspeed.checkpoint.reader import CheckpointReader as CheckpointReader
    from deepspeed.checkpoint.save.writer import Piece as Piece
    from deepspeed.checkpoint.save.writer import write_checkpoint as write_checkpoint
    from deepspeed.checkpoint.source import CheckpointSource as CheckpointSource
    from deepspeed.checkpoint.source import EngineState as EngineState
    from deepspeed.checkpoint.tag_agreement import check_tags as check_tags
    from deepspeed.checkpoint.tag_agreement import resolve_tag as resolve_tag

_NAMES = {
    "CheckpointReader": "deepspeed.checkpoint.reader:CheckpointReader",
    "CheckpointSource": "deepspeed.checkpoint.source:CheckpointSource",
    "EngineState": "deepspeed.checkpoint.source:EngineState",
    "Manifest": "deepspeed.checkpoint.disk.manifest:Manifest",
    "Piece": "deepspeed.checkpoint.save.writer:Piece",
    "UnstorableStateError": "deepspeed.checkpoint.disk.client_state:UnstorableStateError",
    "check_tags": "deepspeed.checkpoint.tag_agreement:check_tags",
    "decode_client_state": "deepspeed.checkpoint.disk.client_state:decode_client_state",
    "encode_client_state": "deepspeed.checkpoint.disk.client_state:encode_client_state",
    "list_tags": "deepspeed.checkpoint.disk.tags:list_tags",
    "open_checkpoint": "deepspeed.checkpoint.opening:open_checkpoint",
    "read_optimizer_state": "deepspeed.checkpoint.moments:read_optimizer_state",
    "resolve_tag": "deepspeed.checkpoint.tag_agreement:resolve_tag",
    "write_checkpoint": "deepspeed.checkpoint.save.writer:write_checkpoint",
}
"""Loaded when first used: the commands that export weights read this room without torch, whose import would be most of their
time."""

__all__ = [*_NAMES]

__getattr__, __dir__ = attach(__name__, submodules=("utils",), names=_NAMES)
