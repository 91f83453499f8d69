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

from deepspeed.checkpoint.client_state import UnstorableStateError, decode_client_state, encode_client_state
from deepspeed.checkpoint.manifest import Manifest
from deepspeed.checkpoint.moments import read_optimizer_state
from deepspeed.checkpoint.opening import open_checkpoint
from deepspeed.checkpoint.reader import CheckpointReader
from deepspeed.checkpoint.source import CheckpointSource, EngineState
from deepspeed.checkpoint.tags import check_tags, list_tags, resolve_tag
from deepspeed.checkpoint.writer import Piece, write_checkpoint

__all__ = [
    "CheckpointReader",
    "CheckpointSource",
    "EngineState",
    "Manifest",
    "Piece",
    "UnstorableStateError",
    "check_tags",
    "decode_client_state",
    "encode_client_state",
    "list_tags",
    "open_checkpoint",
    "read_optimizer_state",
    "resolve_tag",
    "write_checkpoint",
]
